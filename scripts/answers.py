"""Answers of a model folder by plain transformers, greedily and offline: no zft code runs here.

python scripts/answers.py FOLDER PROMPT [PROMPT ...]            readable
python scripts/answers.py FOLDER --json PROMPT [PROMPT ...]     a JSON list of {prompt, answer, ended}
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def answers(folder: str, prompts: list[str], max_new_tokens: int) -> Iterator[dict]:
    """One dict per prompt; `ended`: the model closed its turn itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # float32: bfloat16 products are slow on many CPUs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            tokens = model.generate(**inputs.to(device), max_new_tokens=max_new_tokens, do_sample=False)[0]
        answer = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        yield {"prompt": prompt, "answer": answer.strip(), "ended": tokens[-1].item() == tokenizer.eos_token_id}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    given = parser.parse_args()
    found = answers(given.folder, given.prompts, given.max_new_tokens)
    if given.json:
        print(json.dumps(list(found), ensure_ascii=False))
        return
    for each in found:
        text = each["answer"] + ("" if each["ended"] else " …")
        print(f"> {each['prompt']}\n" + "\n".join(f"    {line}" for line in text.splitlines()), flush=True)


if __name__ == "__main__":
    main()
