"""Split a dense SwiGLU into a shared expert and routed experts: which neuron goes where.

The most active neurons are shared; the rest go to experts of equal size by balanced k-means over how they
fire together.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize, silu

SHARED_NEURONS, NUM_EXPERTS, EXPERT_NEURONS, TOP_K = 1024, 8, 64, 4
SAMPLED_TOKENS, ROUNDS = 4096, 10
SHARED = NUM_EXPERTS  # the group number of shared neurons


def activations(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU neurons before down_proj: hidden [N,H], gate and up [I,H] -> [N,I]."""
    return silu(hidden @ gate.T) * (hidden @ up.T)


def assign_neurons(neurons: torch.Tensor, down: torch.Tensor, seed: int) -> torch.Tensor:
    """Group of every neuron: 0..7 is a routed expert, SHARED the shared one.

    Args:
        neurons: Activations of calibration tokens, [N,I].
        down: The dense down_proj, [H,I].
    Returns:
        uint8 [I].
    """
    strength = (neurons * down.norm(dim=0)).abs()
    groups = torch.full((neurons.shape[1],), SHARED, dtype=torch.uint8)
    routed = strength.mean(0).argsort(descending=True)[SHARED_NEURONS:]
    groups[routed] = _balanced_kmeans(_firing_patterns(strength[:, routed], seed), seed).to(torch.uint8)
    return groups


def _firing_patterns(strength: torch.Tensor, seed: int) -> torch.Tensor:
    """Unit vectors [neurons, tokens] whose dot products are correlations of firing."""
    picked = torch.randperm(len(strength), generator=torch.Generator().manual_seed(seed))[:SAMPLED_TOKENS]
    patterns = (strength / strength.mean(0)).clamp(max=10)[picked].T
    return normalize(patterns - patterns.mean(1, keepdim=True), dim=1)


def _balanced_kmeans(patterns: torch.Tensor, seed: int) -> torch.Tensor:
    start = torch.randperm(len(patterns), generator=torch.Generator().manual_seed(seed))[:NUM_EXPERTS]
    centers = patterns[start]
    for _ in range(ROUNDS):
        groups = _fill(patterns @ centers.T)
        means = torch.stack([patterns[groups == e].mean(0) for e in range(NUM_EXPERTS)])
        centers = normalize(means, dim=1)
    return groups


def _fill(similarity: torch.Tensor) -> torch.Tensor:
    """Best center that still has room, the surest neurons first."""
    groups = torch.full((len(similarity),), -1)
    room = [EXPERT_NEURONS] * NUM_EXPERTS
    wishes = similarity.argsort(dim=1, descending=True).tolist()
    for neuron in similarity.max(1).values.argsort(descending=True).tolist():
        groups[neuron] = next(e for e in wishes[neuron] if room[e])
        room[groups[neuron]] -= 1
    return groups
