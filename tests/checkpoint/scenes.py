"""What the ranks of a multi-process test do.

Each scene plays several tests' worth, and the tests look at what it leaves behind.
"""

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import LlamaForCausalLM

from shardyard.checkpoint.load import load_tensors, read_shapes, select_sound_checkpoint
from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.load import latest_snapshot
from shardyard.checkpoint.snapshots.slot import read_slot
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.config.formulas import slot_labels
from shardyard.errors import LostRankError, StorageError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import hf_config
from tests.checkpoint.kept_memory import FolderMemory

VOCABULARY = 96


def tiny_shape(*, tied: bool = False) -> ModelShape:
    fields = {**PRESETS["llama-tiny"].shape.to_dict(), "vocab_size": VOCABULARY}
    return ModelShape(**{**fields, "tie_word_embeddings": tied})


def start(rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )


def own_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def open_saver(folder: Path, *, keep_last: int = 2) -> Saver:
    return Saver(
        folder,
        group=own_group(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        keep_last=keep_last,
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        tensors[f"model.{name}"] = param.detach()
        for key, value in optimizer.state[param].items():
            tensors[f"optim.{key}.{name}"] = value
    return tensors


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_save(rank: int, world_size: int, folder: Path) -> None:
    """FSDP2 Llama with AdamW; a save that runs beside training collectives; logits of step 2."""
    start(rank, world_size, folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(hf_config(tiny_shape()))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saver = open_saver(folder / "checkpoints")
    tokens = torch.arange(24).reshape(2, 12) % VOCABULARY
    for step in (1, 2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.save(step, state_of(model, optimizer), {"step": step})
    wanted = {name: whole(each).clone() for name, each in state_of(model, optimizer).items()}
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    if rank == 0:
        np.save(folder / "logits.npy", logits.numpy())
        arrays: dict[str, Any] = {name: each.numpy() for name, each in wanted.items()}
        np.savez(folder / "state.npz", **arrays)
    reports = []
    for _ in range(400):  # step 2's state changes here, while it is being written
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports += saver.poll()
        if len(reports) == 2:
            break
    (folder / f"reports-{rank}.json").write_text(json.dumps([each.step for each in reports]))
    saver.close()


def reshard(rank: int, world_size: int, folder: Path) -> None:
    """Load what two ranks saved onto four, in three layouts; save it again from a hybrid mesh."""
    start(rank, world_size, folder)
    chosen = select_sound_checkpoint(
        folder / "checkpoints",
        group=own_group(),
        rank=rank,
        world_size=world_size,
        timeout_s=60,
    )
    assert chosen is not None and chosen.step == 2, chosen
    flat = init_device_mesh("cpu", (world_size,))
    hybrid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    wanted = np.load(folder / "state.npz")
    shapes = {name: shape for name, (shape, _) in read_shapes(chosen.path).items()}
    for mesh, placements in (
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (hybrid, [Replicate(), Shard(0)]),
    ):
        tensors: dict[str, Tensor] = {
            name: distribute_tensor(
                torch.full(shape, torch.nan),
                mesh,
                placements if len(shape) == 2 else [Replicate()] * mesh.ndim,
            )
            for name, shape in shapes.items()
        }
        load_tensors(chosen.path, tensors)
        for name, tensor in tensors.items():
            assert torch.equal(whole(tensor), torch.from_numpy(wanted[name])), (name, placements)
    saver = open_saver(folder / "checkpoints", keep_last=5)
    saver.save(3, tensors, {"step": 3})
    saver.wait()
    saver.close()


def fill_the_disk(rank: int, world_size: int, folder: Path, told_in: str) -> None:
    """``folder`` has 4 MiB: one checkpoint of 2 MiB fits, the next does not, then room is made."""
    start(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    small: dict[str, Tensor] = {"model.w": distribute_tensor(torch.ones(2**18), mesh, [Shard(0)])}
    large: dict[str, Tensor] = {"model.w": distribute_tensor(torch.ones(2**20), mesh, [Shard(0)])}
    saver = open_saver(folder / "checkpoints")
    saver.save(1, small, {})
    saver.wait()
    saver.poll()  # reports step 1 now: the next may already raise
    saver.save(2, large, {})
    told = {}
    for number in range(2000):
        if rank == 1:
            time.sleep(0.003)  # ranks poll at different speeds and still fail at the same call
        total = torch.ones(1)
        dist.all_reduce(total)
        try:
            saver.poll()
        except StorageError as error:
            told = {"poll": number, "message": str(error)}
            break
    told["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    dist.barrier()
    saver.save(3, small, {})
    saver.wait()
    told["after"] = [each.step for each in saver.poll()]
    Path(told_in, f"told-{rank}.json").write_text(json.dumps(told))
    saver.close()


def stay_away(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 never comes to the load, nor to the save, and then it is gone."""
    start(rank, world_size, folder)
    group = own_group()
    saver = open_saver(folder / "checkpoints")
    if rank == 0:
        try:
            select_sound_checkpoint(
                folder, group=group, rank=rank, world_size=world_size, timeout_s=2
            )
        except LostRankError as error:
            (folder / "told.txt").write_text(str(error))
        saver.save(1, {"model.w": torch.zeros(3)}, {})
        (folder / "saving").touch()
        try:
            saver.wait()
        except LostRankError as error:
            (folder / "lost.txt").write_text(str(error))
    while not (folder / "saving").exists():
        time.sleep(0.1)


def save_until_killed(rank: int, world_size: int, folder: Path) -> None:
    """Kill a saving process after ever longer delays; note what each kill left behind."""
    delays_s = [0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1]
    for number, delay_s in enumerate(delays_s):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous-{number}",
                rank=rank,
                world_size=world_size,
            )
            saver = open_saver(folder / "checkpoints", keep_last=1)
            state = {"model.w": torch.zeros(2**21)}  # 8 MiB
            for step in range(1, 1000):
                if step == 3:  # by now the first is durable
                    os.write(tell, b"!")
                saver.save(step, {"model.w": state["model.w"] + step}, {"step": step})
            os._exit(1)
        os.close(tell)
        os.read(told, 1)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        latest = (folder / "checkpoints" / "latest").read_text().strip()
        with (folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps({"names": names, "latest": latest}) + "\n")
        (folder / "checkpoints").rename(folder / f"checkpoints-{number}")


def take_snapshots(rank: int, world_size: int, folder: Path) -> None:
    """Two ranks of one node; the second has not finished the newest snapshot when it is lost."""
    start(rank, world_size, folder)
    group, memory = own_group(), FolderMemory(folder / "memory")
    whole_w = torch.arange(35.0).reshape(7, 5)
    mesh = init_device_mesh("cpu", (world_size,))

    def state(step: int) -> dict[str, Tensor]:
        split: Tensor = distribute_tensor(whole_w + step, mesh, [Shard(0)])
        return {"model.w": split, "buffer.n": torch.tensor(step)}

    snapshots = Snapshots(
        state(0), memory, local_rank=rank, rank=rank, world_size=world_size, generation=0, names=2,
        restored=None, interval=Interval(2),
    )  # fmt: skip
    for step in (2, 4, 6):
        tensors = state(step)
        if step < 6 or rank == 0:
            snapshots.take(step, tensors, {"step": step})
    snapshots.close()
    dist.barrier()
    found, _ = latest_snapshot(
        memory, local_ranks=2, group=group, rank=rank, world_size=world_size, timeout_s=60.0
    )
    assert found is not None and found.values == {"step": found.snapshot_id.step}
    # as a rank of another layout sees it: with both slots of the node, and with its own alone
    single = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    apart, _ = latest_snapshot(
        memory, local_ranks=2, group=single, rank=0, world_size=1, timeout_s=60.0
    )
    lacking, _ = latest_snapshot(
        memory, local_ranks=1, group=single, rank=0, world_size=1, timeout_s=60.0
    )
    assert apart is not None
    filled = {"model.w": torch.full((7, 5), torch.nan), "buffer.n": torch.tensor(0)}
    apart.fill(filled, of_others=(), allow_extra=False)
    told = {
        "newest": found.snapshot_id.step,
        "of_one": torch.equal(filled["model.w"], whole_w + 4) and filled["buffer.n"].item() == 4,
        "alone": lacking,
    }
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


def snapshot_until_killed(rank: int, world_size: int, folder: Path, kills: str) -> None:
    """Kill a process that takes snapshots at random moments; note what each kill left behind."""
    memory, restored = FolderMemory(folder / "memory"), None
    moments = random.Random(0)
    for number in range(int(kills)):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            snapshots = Snapshots(
                {"model.w": torch.zeros(2**21)}, memory, local_rank=0, rank=0, world_size=1,
                generation=number, names=1, restored=restored, interval=Interval(1),
            )  # fmt: skip
            for step in range(restored.step + 1 if restored else 1, 10**6):
                snapshots.take(step, {"model.w": torch.full((2**21,), float(step))}, {})
                os.write(tell, step.to_bytes(8))
            os._exit(1)
        os.close(tell)
        os.read(told, 8)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        begun = int.from_bytes(os.read(told, 2**16)[-8:])
        os.close(told)
        if number == 0:
            start(rank, world_size, folder)  # a group does not survive a fork
            group = own_group()
        slots = [read_slot(piece) for label in slot_labels(0) if (piece := memory(label))]
        found, refused = latest_snapshot(
            memory, local_ranks=1, group=group, rank=0, world_size=1, timeout_s=60.0
        )
        assert found is not None
        filled = {"model.w": torch.zeros(2**21)}
        found.fill(filled, of_others=(), allow_extra=False)
        is_of_one_step = torch.equal(
            filled["model.w"], torch.full((2**21,), found.snapshot_id.step)
        )
        line = {
            "is_of_one_step": is_of_one_step,
            "refused": len(refused),
            "lost": begun - found.snapshot_id.step,
            "cut_off": None in slots,
        }
        with (folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        restored = found.snapshot_id


def play_scene(rank: int, world_size: int, scene: str, folder: Path, *more: str) -> None:
    """Entry point of a rank; no warning passes."""
    warnings.simplefilter("error")
    globals()[scene](rank, world_size, folder, *more)
