"""x"""
CONFIG = "sft"
