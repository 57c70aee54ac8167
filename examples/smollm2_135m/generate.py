"""Generate from a Hugging Face folder with transformers: the last step of `train_cpu.sh`, which shows that the export works.

    python examples/smollm2_135m/generate.py --model runs/smollm2_135m/exported
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = 'How many times does the letter "e" appear in the text: "here we are"?'


def main() -> None:
    """Print one greedy answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--question", default=QUESTION, help="what to ask")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="length of the answer")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    messages = [{"role": "user", "content": args.question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**ids, max_new_tokens=args.max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters\n> {args.question}\n{answer}")


if __name__ == "__main__":
    main()
