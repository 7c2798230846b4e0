"""The chunked head loss against transformers' own loss and autograd, on every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny import ARCHS, tiny_model
from zft.config import ZftError
from zft.models.logits import LogitTransform, logit_transform
from zft.models.loss import HeadLoss, aux_loss, shift_labels


def batch(vocab: int = 64, seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (3, 11), generator=g)
    mask = torch.ones_like(ids)
    mask[2, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    labels[1, 5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def through_head(model: nn.Module, loss: HeadLoss, micro_batch: dict, scale: float) -> tuple[torch.Tensor, object]:
    """Runs the model as the engine does: the head is intercepted, the rest of the forward sees a placeholder."""
    head, inner, seen = model.get_output_embeddings(), model.get_output_embeddings().forward, {}
    targets = loss.targets(micro_batch)

    def intercept(hidden: torch.Tensor) -> torch.Tensor:
        seen["hidden"] = hidden
        seen["loss"], seen["grad"] = loss.forward_backward(head, hidden.detach(), targets, scale, call=inner)
        return loss.placeholder(hidden, head)

    head.forward = intercept
    try:
        output = model(**{k: v for k, v in micro_batch.items() if k != "labels"})
    finally:
        del head.forward
    seen["hidden"].backward(seen["grad"])
    return seen["loss"], output


@pytest.mark.parametrize("arch", sorted(ARCHS))
@pytest.mark.parametrize("chunk_bytes", [1, 5 * 64 * 4, 1 << 20])
def test_equals_the_models_own_loss_and_gradients(arch: str, chunk_bytes: int) -> None:
    micro_batch, count = batch(), 23
    reference = tiny_model(arch)
    expected = reference(**micro_batch, num_items_in_batch=count).loss
    expected.backward()

    model = tiny_model(arch)
    loss, _ = through_head(model, HeadLoss(model, chunk_bytes), micro_batch, 1 / count)
    assert loss.item() / count == pytest.approx(expected.item(), abs=2e-6)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        if want.grad is None:
            assert got.grad is None, name
        else:
            torch.testing.assert_close(got.grad, want.grad, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "granite"])
def test_forward_equals_forward_backward(arch: str) -> None:
    model, micro_batch = tiny_model(arch), batch()
    loss, head = HeadLoss(model, 1000), model.get_output_embeddings()
    hidden = torch.randn(3, 11, 32)
    both, _ = loss.forward_backward(head, hidden, loss.targets(micro_batch), 1.0)
    torch.testing.assert_close(loss.forward(head, hidden, loss.targets(micro_batch)), both, atol=1e-5, rtol=1e-7)


def test_bias_and_float32_accumulators_under_bfloat16_compute() -> None:
    torch.manual_seed(0)
    head = nn.Linear(32, 67, bias=True).bfloat16()
    loss = HeadLoss(tiny_model("llama"), 4 * 67 * 4)
    hidden, labels = torch.randn(2, 9, 32).bfloat16(), torch.randint(0, 67, (2, 9))
    grads = {"weight": torch.ones(67, 32), "bias": torch.ones(67)}
    total, grad_hidden = loss.forward_backward(head, hidden, shift_labels(labels), 1 / 16, grads)

    wide = nn.Linear(32, 67, bias=True)
    wide.load_state_dict({k: v.float() for k, v in head.state_dict().items()})
    leaf = hidden.float().requires_grad_(True)
    logits = wide(leaf)
    want = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 67), labels[:, 1:].reshape(-1), reduction="sum") / 16
    want.backward()
    assert total.item() / 16 == pytest.approx(want.item(), rel=1e-2)
    assert grad_hidden.dtype == torch.bfloat16 and head.weight.grad is None
    torch.testing.assert_close(grads["weight"] - 1, wide.weight.grad, atol=4e-3, rtol=5e-2)
    torch.testing.assert_close(grads["bias"] - 1, wide.bias.grad, atol=4e-3, rtol=5e-2)
    torch.testing.assert_close(grad_hidden.float(), leaf.grad, atol=4e-3, rtol=5e-2)


def test_a_wrapped_head_goes_through_autograd() -> None:
    class Wrapped(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base_layer, self.extra = base, nn.Linear(32, 64, bias=False)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.base_layer(h) + self.extra(h)

    torch.manual_seed(0)
    model, labels = tiny_model("gemma2"), torch.randint(0, 64, (2, 9))
    head = Wrapped(nn.Linear(32, 64))
    loss, hidden = HeadLoss(model, 700), torch.randn(2, 9, 32)
    total, grad_hidden = loss.forward_backward(head, hidden, shift_labels(labels), 0.5)
    got = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    leaf = hidden.clone().requires_grad_(True)
    logits = 30 * torch.tanh(head(leaf) / 30)
    want = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1), reduction="sum")
    (want * 0.5).backward()
    assert total.item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(grad_hidden, leaf.grad, atol=1e-6, rtol=1e-5)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_a_fully_masked_micro_batch_adds_exactly_zero() -> None:
    model = tiny_model("llama")
    loss, head, hidden = HeadLoss(model), model.get_output_embeddings(), torch.full((2, 5, 32), float("nan"))
    total, grad = loss.forward_backward(head, hidden, torch.full((2, 5), -100), 1.0)
    assert total.item() == 0.0 and not grad.any() and not head.weight.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    model = tiny_model("llama").requires_grad_(False)
    loss, head = HeadLoss(model), model.get_output_embeddings()
    _, grad = loss.forward_backward(head, torch.randn(1, 4, 32), torch.tensor([[5, 6, 7, -100]]), 1.0)
    assert head.weight.grad is None and grad.any()


def test_large_logits_do_not_overflow() -> None:
    head = nn.Linear(2, 3, bias=False)
    head.weight.data = torch.tensor([[1e4, 0.0], [0.0, 1e4], [-1e4, 0.0]])
    loss = HeadLoss(tiny_model("llama"))
    total, grad = loss.forward_backward(head, torch.tensor([[[1.0, 0.0]]]), torch.tensor([[1]]), 1.0)
    assert total.item() == pytest.approx(1e4) and torch.isfinite(grad).all()


def test_a_label_outside_the_vocabulary_is_named() -> None:
    model = tiny_model("llama")
    with pytest.raises(ZftError, match="label 64 is outside the model's vocabulary of 64"):
        HeadLoss(model).forward(model.get_output_embeddings(), torch.randn(1, 2, 32), torch.tensor([[64, -100]]))


def test_shifted_labels_end_in_ignore() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3], [-100, 5, 6]])).tolist() == [[2, 3, -100], [5, 6, -100]]


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_router_loss_is_the_models_own(arch: str) -> None:
    micro_batch, count = batch(), 23
    reference = tiny_model(arch, output_router_logits=True, router_aux_loss_coef=0.3)
    expected = reference(**micro_batch, num_items_in_batch=count)
    model = tiny_model(arch, output_router_logits=True, router_aux_loss_coef=0.3)
    loss, output = through_head(model, HeadLoss(model), micro_batch, 1 / count)
    total = loss.float() / count + aux_loss(output, model.config)
    torch.testing.assert_close(total, expected.loss.detach(), atol=2e-6, rtol=1e-6)


def test_no_router_loss_without_router_logits() -> None:
    model = tiny_model("mixtral")
    assert aux_loss(model(torch.tensor([[5, 6]])), model.config) is None


@pytest.mark.parametrize(
    ("arch", "settings", "want"),
    [
        ("llama", {}, LogitTransform()),
        ("granite", {"logits_scaling": 7.0}, LogitTransform(scale=1 / 7)),
        ("gemma2", {"final_logit_softcapping": 13.0}, LogitTransform(cap=13.0)),
        ("gemma2", {"final_logit_softcapping": None}, LogitTransform()),
    ],
)
def test_transform_is_found_by_asking_the_model(arch: str, settings: dict, want: LogitTransform) -> None:
    model = tiny_model(arch, **settings)
    found = logit_transform(model)
    assert found.scale == pytest.approx(want.scale, rel=1e-8) and found.cap == want.cap
    assert "forward" not in vars(model.get_output_embeddings()), "the probe must leave no trace"


def test_an_unknown_transform_is_refused() -> None:
    model = tiny_model("llama")
    inner = model.forward

    def odd(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits.abs()
        return output

    model.forward = odd
    with pytest.raises(ZftError, match="LlamaForCausalLM changes its logits"):
        logit_transform(model)
