"""Peak memory of scoring against the number of tokens and the size of the vocabulary: it must not grow with their product.

    python benchmarks/memory.py

A small random model with each vocabulary scores groups of 8 completions, in a process of its own. The column `logits` is what the
log-softmax of all scored tokens would take in float32.
"""

import argparse
import resource
import subprocess
import sys

CELLS = [(vocab, tokens) for vocab in (512, 49_152, 151_936) for tokens in (1_024, 16_384)]


def one(vocab: int, tokens: int) -> None:
    """Print MB: resident after loading, and the peak after scoring, with and without ranks."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from topd.models.language_model import LanguageModel
    from topd.models.logprobs import Tokens, ranked_logprobs, score_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = Qwen3Config(vocab_size=vocab, head_dim=16, tie_word_embeddings=True, max_position_embeddings=4096, **sizes)
    model = LanguageModel(
        name="random",
        module=Qwen3ForCausalLM(config).eval(),
        tokenizer=PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast),
        eos_token_ids=(0,),
        vocab_size=vocab,
        context_length=4096,
    )
    length = 128
    group = Tokens((1,) * 64, tuple(tuple((i + k) % vocab for k in range(length)) for i in range(8)))
    groups = [group] * (tokens // (8 * length))
    warm = [Tokens((1,), ((2,),))]
    score_groups(model, warm, max_tokens=4096)
    found = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024]
    score_groups(model, groups, max_tokens=4096)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    ranked_logprobs(model, groups, max_tokens=4096, top_k=20)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    print(*found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(*args.one)
        return
    print("| vocabulary | tokens | logits, MB | growth while scoring, MB | with ranks and top 20, MB |")
    print("| --- | --- | --- | --- | --- |")
    for vocab, tokens in CELLS:
        command = [sys.executable, __file__, "--one", str(vocab), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded, scored, ranked = map(int, done.stdout.split())
        print(f"| {vocab:,} | {tokens:,} | {vocab * tokens * 4 // 2**20:,} | {scored - loaded} | {ranked - loaded} |")


if __name__ == "__main__":
    main()
