"""What a step may touch: its own blocks; how it ends early; what it refuses before it computes anything."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.batch import Batch
from services.engine.torch_engine.kernel.checkpoint import Mapped
from services.engine.torch_engine.kernel.library import DType, Library
from services.engine.torch_engine.kernel.model import KernelModel, StopFlag
from services.models.errors import ModelError
from tests.engine.kernel.conftest import checkpoint, machine
from tests.engine.kernel.rig import BLOCKS, NAN, Piece, batch, tensors_in
from tests.engine.torch_engine import tiny
from tests.waiting import PATIENCE_S


def test_a_row_with_nan_in_its_kv_does_not_touch_its_batch_mates(library: Library, half_gqa: tiny.Tiny) -> None:
    with machine(library, half_gqa) as shared:
        short, long = (shared.tokens(tiny.prompt(seed, length)) for seed, length in ((1, 5), (2, 70)))
        alone = shared.whole(short.ids)[-1]
        shared.step(Piece(short, 4), Piece(long, 69))
        shared.kv[long.blocks] = NAN
        logits = shared.step(Piece(short, 1), Piece(long, 1), threads=2)
        assert logits is not None
        assert logits[0].tobytes() == alone.tobytes()
        assert np.isnan(logits[1]).all()


def test_nothing_outside_the_sequence_s_blocks_is_written(library: Library, half_gqa: tiny.Tiny) -> None:
    with machine(library, half_gqa) as shared:
        sequence = shared.tokens(tiny.prompt(1, 33))
        shared.step(Piece(sequence, 33), threads=3)
        untouched = [block for block in range(BLOCKS) if block not in sequence.blocks]
        assert (shared.kv[untouched] == NAN).all()
        # K lies [head][dim][token]: of the third block one token of sixteen is written
        third = shared.kv[sequence.blocks[2]].view(np.float16)[: 2 * 8 * 16].reshape(2, 8, 16)
        assert np.isfinite(third[:, :, 0]).all()
        assert np.isnan(third[:, :, 1:]).all()


def test_a_value_too_large_for_float16_spoils_no_earlier_row(library: Library, tmp_path: Path) -> None:
    """Rows of one tile weigh each other's values with 0; and 0 times infinity would be NaN."""
    model = checkpoint(tmp_path, torch.float32)
    tensors = tensors_in(tmp_path)
    name = "model.layers.2.self_attn.v_proj.weight"
    huge = np.full(tensors[name].shape, 1e6, np.float32)
    tensors[name] = replace(tensors[name], data=huge.view(np.uint8).ravel())
    with machine(library, model) as shared:
        shared.model.close()
        shared.tensors = tensors
        shared.__post_init__()
        assert np.isfinite(shared.whole(tiny.prompt(1, 20))).all()


def test_a_stopped_step_computes_nothing(library: Library, half_gqa: tiny.Tiny) -> None:
    stop = StopFlag()
    stop.set()
    with machine(library, half_gqa) as shared:
        sequence = shared.tokens(tiny.prompt(1, 33))
        assert shared.step(Piece(sequence, 33), threads=2, stop=stop) is None
        assert (shared.kv == NAN).all()
        sequence.computed = 0
        again = shared.step(Piece(sequence, 33), threads=2)
        assert again is not None
        assert again[0].tobytes() == shared.whole(sequence.ids)[-1].tobytes()


def test_a_step_ends_between_two_layers_when_it_is_stopped(library: Library, tmp_path: Path) -> None:
    """And it holds no GIL: this thread sees the first layer's KV appear while the last one's is not there."""
    model = checkpoint(tmp_path, torch.float16, num_hidden_layers=300, max_position_embeddings=512)
    with machine(library, model) as shared:
        sequence, stop = shared.tokens(tiny.prompt(1, 500)), StopFlag()
        layer = shared.kv.shape[1] // 300
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(shared.step(Piece(sequence, 500), stop=stop)))
        thread.start()
        while (shared.kv[sequence.blocks[0], :layer] == NAN).all():
            assert thread.is_alive()
        stop.set()
        thread.join(timeout=60)
        assert answers == [None]
        assert (shared.kv[sequence.blocks[0], -layer:] == NAN).all()


CHANGES: dict[str, Callable[[Batch], Batch]] = {
    "an id below 0": lambda b: replace(b, ids=b.ids - 300),
    "an id outside the vocabulary": lambda b: replace(b, ids=b.ids + np.int32(tiny.VOCAB)),
    "a position outside the context": lambda b: replace(b, positions=b.positions + np.int32(tiny.CONTEXT)),
    "positions with a gap": lambda b: replace(b, positions=b.positions * np.int32(2)),
    "a block that does not exist": lambda b: replace(b, tables=b.tables + np.int32(BLOCKS)),
    "a table that is too short": lambda b: replace(b, tables=b.tables[:1]),
    "spans that leave rows out": lambda b: replace(b, spans=b.spans - np.array([0, 1, 0], np.int32)),
    "spans that go too far": lambda b: replace(b, spans=b.spans + np.array([0, 1, 0], np.int32)),
    "a sampled row that does not exist": lambda b: replace(b, sampled=b.sampled + np.int32(1)),
    "no rows": lambda b: replace(b, ids=b.ids[:0], positions=b.positions[:0], spans=b.spans[:0], sampled=b.sampled[:0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_points_outside_is_refused_before_it_writes(library: Library, half_gqa: tiny.Tiny, change: str) -> None:
    with machine(library, half_gqa) as shared:
        wrong = CHANGES[change](batch(Piece(shared.tokens(tiny.prompt(1, 33)), 33)))
        with pytest.raises(ValueError, match="does not exist"):
            shared.model.compute(wrong, StopFlag(), 1)
        assert (shared.kv == NAN).all()


def test_a_step_larger_than_was_reserved_is_refused(library: Library, half_gqa: tiny.Tiny) -> None:
    with machine(library, half_gqa) as shared:
        pieces = [Piece(shared.tokens(tiny.prompt(number, 201)), 201) for number in range(3)]
        with pytest.raises(ValueError, match="does not exist"):
            shared.model.compute(batch(*pieces), StopFlag(), 1)


def test_a_closed_model_computes_nothing(library: Library, half_gqa: tiny.Tiny) -> None:
    with machine(library, half_gqa) as shared:
        shared.model.close()
        with pytest.raises(ValueError, match="closed"):
            shared.whole([5, 6])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(library: Library, half_gqa: tiny.Tiny, name: str) -> None:
    config, tensors = load_config(half_gqa.files.config), tensors_in(half_gqa.files.folder)

    def open_with(changed: dict[str, object]) -> KernelModel:
        return KernelModel(library, config, changed, np.zeros(0, np.uint8), max_rows=1, max_threads=1)  # type: ignore[arg-type]

    with pytest.raises(ModelError, match=f"lack {name}"):
        open_with({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ModelError, match=f"{name} has shape"):
        open_with(tensors | {name: replace(tensors[name], shape=(3, 3))})
    with pytest.raises(ModelError, match=f"does not have: {name}.more"):
        open_with(tensors | {f"{name}.more": tensors[name]})


def test_a_bias_that_the_configuration_promises_must_be_there(library: Library, half_gqa: tiny.Tiny) -> None:
    config = replace(load_config(half_gqa.files.config), qkv_bias=True)
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.self_attn\.q_proj\.bias"):
        KernelModel(library, config, tensors_in(half_gqa.files.folder), np.zeros(0, np.uint8), max_rows=1, max_threads=1)


def test_a_tied_model_may_store_its_head_once_more_but_none_of_its_own(library: Library, half_gqa: tiny.Tiny) -> None:
    config, tensors = replace(load_config(half_gqa.files.config), tied=True), tensors_in(half_gqa.files.folder)

    def open_with(head: Mapped) -> KernelModel:
        changed = tensors | {"lm_head.weight": head}
        return KernelModel(library, config, changed, np.zeros(0, np.uint8), max_rows=1, max_threads=1)

    open_with(tensors["model.embed_tokens.weight"]).close()
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding"):
        open_with(tensors["lm_head.weight"])


def test_gate_and_up_of_different_types_are_refused(library: Library, half_gqa: tiny.Tiny) -> None:
    """They are multiplied side by side, as one type."""
    tensors = tensors_in(half_gqa.files.folder)
    name = "model.layers.1.mlp.up_proj.weight"
    mixed = tensors | {name: replace(tensors[name], dtype=DType.F32)}
    with pytest.raises(ModelError, match="different types"):
        KernelModel(library, load_config(half_gqa.files.config), mixed, np.zeros(0, np.uint8), max_rows=1, max_threads=1)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads of this process as Linux shows them")
@pytest.mark.parametrize("closed", [True, False])
def test_the_threads_of_a_model_end_with_it_closed_or_dropped(library: Library, half_gqa: tiny.Tiny, closed: bool) -> None:
    before = set(os.listdir("/proc/self/task"))
    shared = machine(library, half_gqa, max_threads=3)
    own = set(os.listdir("/proc/self/task")) - before
    assert len(own) == 2
    if closed:
        shared.model.close()
        shared.model.close()
        with pytest.raises(ValueError, match="closed"):
            shared.whole([1])
    del shared
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while own & set(os.listdir("/proc/self/task")):  # one that was joined is listed for a moment still
        assert time.monotonic() < deadline
        time.sleep(0.001)
