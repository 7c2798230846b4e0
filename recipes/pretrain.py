"""x"""
CONFIG = "pretrain"
