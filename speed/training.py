"""Forward and backward pass over completions: ours against the plain implementation (padding, all logits in memory).

python speed/training.py smollm2                    # on a GPU: random weights, the real shape, bfloat16
python speed/training.py MODEL_DIR --rows 8         # on a CPU, float32
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a shape with random weights, as smollm2, or the folder of a model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=192, help="tokens of a sequence, all but the first predicted")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table, timed
    from sampling import MATRIX_RATE
    from shapes import SHAPES, make_model
    from transformers import AutoModelForCausalLM

    from hacrl.decoder import Backbone
    from hacrl.decoder.plain import completion_logprobs
    from hacrl.decoder.policy import Score
    from hacrl.decoder.scoring import GraphedScorer, Scorer
    from hacrl.learners.weights import cast_parameters

    on_cuda = torch.cuda.is_available()
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    folder = options.model
    with tempfile.TemporaryDirectory() as name:
        device = "cuda" if on_cuda else "cpu"
        if options.model in SHAPES:
            make_model(folder := Path(name), SHAPES[options.model], 1e9, device)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    backbone = Backbone(model)
    backbone.checkpointing = options.checkpointing
    cast_parameters(model, dtype)
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(3, 40000, (options.rows, options.length), generator=generator).tolist()
    prompts, completions = [row[:1] for row in sequences], [row[1:] for row in sequences]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    figures: dict[str, dict[str, float]] = {}
    scorer = GraphedScorer(backbone) if on_cuda else Scorer(backbone)
    for name, score in (("ours", scorer), ("plain", partial(completion_logprobs, model, pad_id=0))):
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def step(score: Score = score) -> None:
            with backbone.driven() if isinstance(score, Scorer) else torch.enable_grad():
                score(prompts, completions, 1.0).logp_NT.sum().backward()

        try:
            seconds = sorted(timed(step, options.repeats, warmup=3))
        except torch.OutOfMemoryError:
            figures[name] = {"rate": 0.0, "peak": float("inf")}
            continue
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0
        figures[name] = {"rate": options.rows * options.length / seconds[len(seconds) // 2], "peak": peak}
    if on_cuda:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        figures["floor: 6 operations a parameter and token"] = {"rate": MATRIX_RATE / (6 * parameters), "peak": 0.0}
    size = f"{options.rows} x {options.length} tokens"
    rows = [[name, f"{f['rate']:,.0f}", f"{f['peak']:.1f}" if f["peak"] else ""] for name, f in figures.items()]
    title = f"Forward and backward of {options.model}, {size}, {str(dtype)[6:]}; {machine()}"
    print_table(title, ["", "tokens/s", "peak GiB"], rows)
    if options.json:
        options.json.write_text(json.dumps({"size": size, "figures": figures}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
