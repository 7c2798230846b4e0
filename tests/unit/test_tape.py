"""The tape: aliases that may change in place, kept inputs that may not, and glue that is walked at the right time."""

import pytest
import torch

from zft.engine.tape import Cut, Entry, KeptTensor, Slot, Tape, direct_slot, latest_source, tensors_of
from zft.engine.unit import Unit

ANCHOR = torch.zeros((), requires_grad=True)


def cut(tensor: torch.Tensor, visit: int = 0, in_place: bool = True) -> tuple[torch.Tensor, Slot]:
    slot = Slot(visit)
    return Cut.apply(ANCHOR, slot, tensor, in_place), slot


def unit(name: str = "layer") -> Unit:
    return Unit(name, None, 0, [])


def test_the_gradient_of_a_cut_output_lands_in_its_slot_and_adds_up():
    alias, slot = cut(torch.ones(3))
    (alias * 2).sum().backward(retain_graph=True)
    (alias * 5).sum().backward()
    assert torch.equal(slot.gradient, torch.full((3,), 7.0))


def test_a_cut_output_may_be_changed_in_place():
    source = torch.ones(3)
    alias, slot = cut(source)
    assert alias.data_ptr() == source.data_ptr()
    alias.mul_(3.0)
    (alias**2).sum().backward()
    assert torch.equal(slot.gradient, torch.full((3,), 18.0))  # 2 * (3x) * 3
    assert direct_slot(alias) is None  # what it is now came out of an operation


def test_an_unchanged_output_is_known_by_its_slot():
    alias, slot = cut(torch.ones(3))
    kept = KeptTensor.keep(alias, None)
    assert direct_slot(alias) is slot and kept.slot is slot and kept.edge is None


def test_a_kept_input_that_was_changed_is_an_error():
    alias, _ = cut(torch.ones(3))
    kept = KeptTensor.keep(alias, None)
    assert torch.equal(kept.fetch("layer"), torch.ones(3))
    alias.add_(1.0)
    with pytest.raises(RuntimeError, match="an input of layer was changed in place"):
        kept.fetch("layer")


def test_a_kept_tensor_without_gradient_is_checked_too():
    mask = torch.zeros(3)
    kept = KeptTensor.keep(mask, None)
    mask.fill_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        kept.fetch("layer")


def test_an_entry_keeps_each_tensor_once_and_gives_it_back_in_its_place():
    x, mask = torch.ones(2, requires_grad=True), torch.zeros(2)
    entry = Entry.of((x, {"m": mask}), {"again": x, "flag": True, "masks": [mask, None]}, None, None)
    args, kwargs, pairs = entry.inputs("layer")
    assert args[0] is kwargs["again"] and args[0].is_leaf and args[0].requires_grad and args[0] is not x
    assert args[1]["m"] is kwargs["masks"][0] and kwargs["flag"] is True and kwargs["masks"][1] is None
    assert [leaf is args[0] for _, leaf in pairs] == [True]


def test_gradients_of_glue_add_up_and_are_walked_once_everything_downstream_is_through():
    """visit 0 -> y -> glue (y * w) feeds visits 1 and 2."""
    w = torch.tensor(3.0, requires_grad=True)
    y, slot = cut(torch.tensor(2.0), visit=0)
    glue = y * w
    kept = KeptTensor.keep(glue, None)
    tape = Tape()
    for _ in range(3):
        tape.visit(unit())
    tape.deliver(kept, torch.tensor(10.0))
    tape.flush(2)  # about to walk visit 2: the glue comes from visit 0, so it waits
    tape.deliver(kept, torch.tensor(1.0))
    tape.flush(1)
    assert slot.gradient is None and w.grad is None
    tape.flush(0)
    assert slot.gradient.item() == 33.0 and w.grad.item() == 22.0 and not tape.glue


def test_glue_without_a_source_in_the_tape_is_walked_at_the_end():
    """What the model computed before its first unit."""
    w = torch.tensor(3.0, requires_grad=True)
    kept = KeptTensor.keep(w * 2, None)
    tape = Tape()
    tape.visit(unit())
    tape.deliver(kept, torch.tensor(1.0))
    tape.flush(0)
    assert w.grad is None
    tape.flush(-1)
    assert w.grad.item() == 2.0


def test_glue_that_shares_a_part_of_its_graph():
    """common = y^2; a = common + 1 feeds visit 1, b = common * 3 feeds visit 2: both walk through `common`."""
    y, slot = cut(torch.tensor(2.0), visit=0)
    common = y**2
    kept_a, kept_b = KeptTensor.keep(common + 1, None), KeptTensor.keep(common * 3, None)
    later, _ = cut(torch.tensor(1.0), visit=1)
    kept_c = KeptTensor.keep(common * later, None)
    tape = Tape()
    for _ in range(3):
        tape.visit(unit())
    tape.deliver(kept_c, torch.tensor(1.0))
    tape.flush(1)  # kept_c's latest source is visit 1, so its graph, with `common` in it, is walked first
    tape.deliver(kept_b, torch.tensor(1.0))
    tape.deliver(kept_a, torch.tensor(1.0))
    tape.flush(0)
    assert slot.gradient.item() == 4.0 * (1 + 3 + 1)


def test_latest_source_is_the_latest_visit_below():
    first, _ = cut(torch.ones(1), visit=2)
    second, _ = cut(torch.ones(1), visit=5)
    assert latest_source((first + second).grad_fn) == 5
    assert latest_source((first * 2).grad_fn) == 2
    assert latest_source((torch.ones(1, requires_grad=True) * 2).grad_fn) == -1


def test_tensors_of_finds_floating_tensors_in_any_structure():
    output = (torch.ones(1), {"ids": torch.ones(1, dtype=torch.long), "x": torch.zeros(1)}, None, 3)
    tensors, flat, _, positions = tensors_of(output)
    assert [t.item() for t in tensors] == [1.0, 0.0] and len(flat) == 5 and positions == [0, 2]
