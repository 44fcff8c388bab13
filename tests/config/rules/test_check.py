"""What no type can say: each contradiction is named, with what to do."""

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check, load_checked_recipe
from shardyard.errors import RecipeError

PROBLEMS = [
    (
        ["model.lora.alpha=8"],
        "model.lora.alpha: is for adapters, which need model.lora.rank",
    ),
    (
        ["model.lora.rank=8", "model.frozen=[lm_head]"],
        "model.frozen=lm_head with model.lora.rank=8: only adapters are trained",
    ),
    (
        ["model.lora.rank=8", "precision.compute=fp8"],
        "model.lora.rank=8 with precision.compute=fp8: adapters with fp8 products are not built",
    ),
    (
        ["model.lora.rank=8", "model.preset=null", "model.module=json:loads"],
        "model.lora.rank=8 adds adapters to known matrices, and what is inside of model.module",
    ),
    (
        ["model.preset=llama-tiny", "model.lora={rank: 8, targets: [lm_head]}"],
        "model.lora.targets='lm_head' gets no adapter",
    ),
    (
        ["task.name=dpo"],
        "task.name=dpo: that is a loss of pairs of answers. Use task.name=preference",
    ),
    (
        ["model.preset=null"],
        "model: does not say which model to train. Write `model: {preset: llama-tiny}`",
    ),
    (["model.path=x", "model.hub=a/b"], "model.path and model.hub each name a model. Keep one"),
    (["model.config=c.json", "model.path=x"], "model.config: and model.preset each say what shape"),
    (["model.preset=null", "model.config=c.json"], "Give model.path or model.hub too"),
    (["launch.image_paths=[data]"], "launch.image_paths=data is not an absolute path"),
    (
        ["model.preset=lama-tiny"],
        "model.preset=lama-tiny is not a preset. Did you mean llama-tiny?",
    ),
    (["model.preset=zzz"], "Presets are llama-tiny, llama-laptop"),
    (["model.weights=load"], "a preset has no weights. Use model.path or model.hub"),
    (["model.blocks=[layers]"], "model.blocks=layers is for model.module; other models have"),
    (["model.module=json:loads"], "model.module and model.preset each name a model. Keep one"),
    (["run.steps=1", "run.epochs=1"], "run.steps, run.epochs are all lengths of the run"),
    (["secrets={HF_TOKEN: b}"], "secrets.HF_TOKEN: (not shown) does not say where the secret is"),
    (["secrets={A-B: env}"], "secrets: 'A-B' is not a valid name of an environment variable"),
    (["secrets={T: env}", "launch.env={T: x}"], "secrets.T: is in launch.env too"),
    (["launch.env={WANDB_API_KEY: abc}"], "instead: `secrets: {WANDB_API_KEY: env}`"),
    (["parallel.strategy=NO_SHARD", "parallel.dp_shard=2"], "contradicts strategy NO_SHARD"),
    (["cluster.devices=4", "parallel.dp_shard=3"], "dp_shard=3 does not divide the 4"),
    (
        ["optim.global_batch=2", "optim.micro_batch=4"],
        "micro_batch=4 is more than the 2 samples of",
    ),
    (["cluster.devices=4", "optim.global_batch=2"], "fewer samples than the 4 data-parallel"),
    (["parallel.pp=2", "parallel.schedule=zb-v"], "zb-v: that one gives each rank 2 stages."),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.zero=3"],
        "parallel.zero=3 with parallel.schedule=zero-bubble would lose gradients",
    ),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "model.compile=true"],
        "model.compile=true with parallel.schedule=zero-bubble: a compiled block has one backward",
    ),
    (["optim.name=sgd"], "optim.lr=auto is known for adamw and muon only. Give one"),
    (
        ["optim.name=lamb"],
        "known for adamw and muon only. Give one; 1e-3 is a usual start for lamb.",
    ),
    (
        ["optim.momentum=0.9"],
        "optim.momentum=0.9 is a setting of sgd, lars and muon; optim.name is adamw, which "
        "reads betas",
    ),
    # given, so somebody believes that it acts, also where it is the default
    (
        ["optim.name=sgd", "optim.lr=0.1", "optim.eps=1e-8"],
        "optim.eps=1e-08 is a setting of adamw, lamb, muon and schedule_free_adamw; optim.name is "
        "sgd, which reads momentum and nesterov. Leave it out.",
    ),
    (
        ["optim.name=schedule_free_adamw", "optim.lr=1e-3", "optim.schedule=cosine"],
        "optim.schedule=cosine changes the learning rate, and optim.name=schedule_free_adamw "
        "averages its steps instead. Set optim.schedule=constant, which keeps the warm-up.",
    ),
    (
        ["optim.name=schedule_free_adamw", "optim.lr=1e-3", "optim.schedule_module=own:halved"],
        "optim.schedule_module=own:halved changes the learning rate, and "
        "optim.name=schedule_free_adamw averages its steps instead. Leave it out.",
    ),
    (
        ["optim.name=schedule_free_adamw", "optim.lr=1e-3", "optim.ema_decay=0.999"],
        "optim.ema_decay=0.999 averages weights for validation and exports, and "
        "optim.name=schedule_free_adamw averages its steps instead. Leave it out.",
    ),
    (
        ["optim.name=schedule_free_adamw", "optim.lr=1e-3", "optim.betas=[0,0.99]"],
        "optim.betas=0 as its first: the average that is evaluated follows from it. Use 0.9.",
    ),
    (
        ["optim.name=adafactor", "optim.lr=1e-3", "precision.optimizer_states=bf16"],
        "precision.optimizer_states=bf16 with optim.name=adafactor: its states are a few vectors, "
        "always fp32. Leave it out.",
    ),
    (["optim.nesterov=false"], "optim.nesterov=False is a setting of sgd"),
    (
        ["optim.batch_per_device=2", "optim.global_batch=4"],
        "optim.batch_per_device=2 and optim.global_batch=4 each say how many samples a step has",
    ),
    (["optim.lr_scaling=sqrt"], "optim.lr_scaling=sqrt follows a batch that changes with"),
    (
        ["optim.batch_per_device=2", "optim.lr_batch=4"],
        "optim.lr_batch=4 is the batch that optim.lr is for, and optim.lr_scaling=none never",
    ),
    (
        ["optim.warmup_share=0.1", "optim.warmup_steps=4"],
        "optim.warmup_share=0.1 and optim.warmup_steps=4 each say how long the warm-up is.",
    ),
    (
        ["optim.warmup_share=0.1", "optim.warmup_epochs=5"],
        "optim.warmup_share=0.1 and optim.warmup_epochs=5 each say how long the warm-up is.",
    ),
    (
        ["optim.milestones=[3, 4.5]"],
        "optim.milestones=3, 4.5 is of schedule step, and optim.schedule=cosine does not read it.",
    ),
    (["optim.milestone_factor=0.2"], "optim.milestone_factor=0.2 is of schedule step"),
    (["optim.schedule=step"], "optim.milestones: says at which epochs the learning rate falls"),
    (["optim.schedule=step", "optim.milestones=[6, 3]"], "Give them, such as [30, 60, 80]."),
    (
        ["optim.schedule=step", "optim.milestones=[3]", "optim.decay_steps=9"],
        "optim.decay_steps=9: with optim.schedule=step the rate falls by optim.milestone_factor",
    ),
    (["optim.poly_power=1.0"], "optim.poly_power=1 is of schedule poly, and optim.schedule=cosine"),
    (
        ["cluster.devices=4", "optim.batch_per_device=1", "optim.micro_batch=8"],
        "optim.micro_batch=8 is more than the 4 samples of a step",
    ),
    (
        ["optim.name=sgd", "optim.lr=0.1", "optim.nesterov=true"],
        "optim.nesterov=True steps along the momentum, and optim.momentum is 0. Give one",
    ),
    (
        [
            "precision.optimizer_states=bf16",
            "optim.name=lamb",
            "optim.lr=1",
            "optim.betas=[.999,0]",
        ],
        "precision.optimizer_states=bf16 with optim.betas of 0.999",
    ),
    (
        ["precision.compute=fp16", "precision.reduce=bf16"],
        "precision.reduce=bf16 with precision.compute=fp16: bf16 keeps 8 of the 11 bits of such a",
    ),
    (
        ["precision.compute=bf16", "precision.loss_scale=1024"],
        "precision.loss_scale=1024 with precision.compute=bf16, whose gradients need no scale. "
        "Leave it out, or use precision.compute=fp16.",
    ),
    (
        ["precision.optimizer_states=bf16", "optim.betas=[0.9, 0.999]"],
        "precision.optimizer_states=bf16 with optim.betas of 0.999: a step moves such an average "
        "by 0.001 of a difference",
    ),
    (
        ["precision.optimizer_states=bf16", "optim.name=sgd", "optim.lr=1", "optim.momentum=0.995"],
        "Use at most 0.99 there, or precision.optimizer_states=fp32.",
    ),
    (["optim.warmup_steps=9", "optim.decay_steps=5"], "is not before optim.decay_steps=5."),
    (["task.eval_every_steps=1", "task.eval_every_epochs=1"], "say the same in two ways."),
    (["task.eval_every_steps=1", "data.eval_fraction=0"], "task.eval_every_steps needs an eval"),
    (["run.target.loss=2", "data.eval_fraction=0"], "run.target needs an evaluation"),
    (
        ["run.patience=2"],
        "run.patience=2 counts validations, and there is one at the end only. Set",
    ),
    (["data.format=txt"], "data.format=txt: unknown format. Did you mean text?"),
    (
        ["data.loss_on=all"],
        "data.loss_on=all has no effect where data.format is by_suffix: it i",
    ),
    (["data.too_long=cut"], "cut documents as they come. Set data.pack=whole, or leave it out."),
    (
        ["data.mixture=[{source: a, weight: 1, name: a, format: chat, text_key: b}]"],
        "data.mixture[0].text_key='b' has no effect where the format is chat. Leave it out.",
    ),
    (["data.pack=whole"], "put together when data is prepared. Give their room."),
    (
        ["data.pack=whole", "data.seq_len=64", "data.attend_across_documents=true"],
        "data.pack=whole keeps documents apart. Leave it out, or set data.pack=stream.",
    ),
    (
        ["data.pack=whole", "data.seq_len=64", "task.name=masked_lm", "model.preset=bert-tiny"],
        "masked_lm on data.format=by_suffix makes its samples in another way. Use data.pack",
    ),
    (
        ["data.format=chat", "data.bos=true"],
        "data.bos=True has no effect where data.format is ch",
    ),
    (
        ["data.format=chat", "data.chat_template=chatlm"],
        "is known. Did you mean chatml? One of",
    ),
    (["data.format=chat", "run.target.bits_per_byte=2"], "of running text. Use loss for dialogues"),
    (
        ["data.format=chat", "data.loss_share=[0.9, 0.1]"],
        "is not a range. Write the smaller",
    ),
    (
        ["data.format=chat", "task.name=masked_lm", "model.preset=bert-tiny"],
        "masked_lm would learn all of a dialogue. Use task.name=causal_lm.",
    ),
    (["data.format=by-hand"], "unknown format. There are by_suffix, text, "),
    (["run.target={perplexty: 2}"], "not a metric of causal_lm. Did you mean perplexity?"),
    (
        ["run.target={cod/loss: 2}", "data.eval_sets={code: code.txt}"],
        "not a metric of causal_lm. Did you mean code/loss?",
    ),
    (
        ["run.target={top1: 0.7}"],
        ("names top1, which is not a metric of causal_lm. It has loss, perp"),
    ),
    (
        ["run.target.bits_per_byte=2", "task.name=masked_lm", "model.preset=bert-tiny"],
        "names bits_per_byte, which is not a metric of masked_lm. It has loss, perplexity, ",
    ),
    (
        ["task.name=bert_pretraining", "model.preset=bert-tiny"],
        "data.format=by_suffix does not prepare what task.name=bert_pretraining reads. Use sent",
    ),
    (
        ["data.format=bert_h5", "data.tokenizer=x"],
        "data.format=bert_h5 holds whole samples, which task.name=causal_lm does not read. Use",
    ),
    (["run.target_loss=2"], "run.target_loss: this setting was replaced: run.target"),
    (
        ["launch.aws_batch.subnets=[subnet-1]"],
        "launch.aws_batch.subnets: this setting was replaced: it is the queue's",
    ),
    (["elastic.min_nodes=2"], "elastic.min_nodes=2 is more than cluster.nodes=1."),
    (["cluster.nodes=2", "elastic.max_nodes=1"], "elastic.max_nodes=1 is less than cluster.node"),
    (
        ["elastic.snapshot_neighbour=true", "cluster.nodes=2"],
        "elastic.snapshot_neighbour=true copies snapshots, but snapshots are off. Set elastic.sn",
    ),
    (
        ["elastic.snapshot_neighbour=true", "elastic.snapshot_every=5"],
        "elastic.snapshot_neighbour=true needs a second node, which keeps the copies. Leave it at",
    ),
    (
        ["elastic.leave_out_for=[slow_rank]", "cluster.nodes=3"],
        "elastic.leave_out_for=[slow_rank] continues with one node less, but elastic.min_nodes=3 "
        "needs all of the 3 that there may be. Set elastic.min_nodes below, or leave it empty.",
    ),
    (
        [
            "elastic.leave_out_for=[xid,slow_rank]",
            "cluster.nodes=2",
            "elastic.min_nodes=1",
            "cluster.instance=p5.48xlarge",
        ],
        "elastic.leave_out_for=[slow_rank] with cluster.device=cuda: there a collective returns",
    ),
    (
        [
            "elastic.leave_out_for=[xid,throttled,slow_network]",
            "cluster.nodes=2",
            "elastic.min_nodes=1",
            "cluster.device=cpu",
        ],
        "elastic.leave_out_for=[xid] with cluster.device=cpu: processors have no counters of dev",
    ),
    (
        [
            "elastic.leave_out_for=[xid]",
            "cluster.nodes=2",
            "elastic.min_nodes=1",
            "observe.telemetry_every_s=null",
        ],
        "elastic.leave_out_for=[xid] follows from what telemetry finds, and "
        "observe.telemetry_every_s=null writes none. Give it seconds, or leave these out.",
    ),
    (["elastic.straggler=leave_out"], "elastic.straggler: this setting was replaced: ela"),
    (
        ["launch.volumes=[{path: /a}]"],
        "launch.volumes[0]: does not say what to mount at /a. Give one",
    ),
    (["launch.volumes=[{path: /a, claim: c, efs: f}]"], "names claim and efs at /a."),
    (
        ["launch.volumes=[{path: /a, claim: c}, {path: /a/, claim: d}]"],
        "2 volumes are mounted at /a, and only one can be seen.",
    ),
    (["launch.volumes=[{path: '/a:b', claim: c}]"], "launch.volumes[0].path=/a:b holds a colon"),
    (["launch.volumes=[{path: a, claim: c}]"], "launch.volumes[0].path=a is not an absolute path."),
    (["launch.run_dir=runs"], "launch.run_dir=runs is not an absolute path."),
    (["launch.require_efa=true"], "launch.require_efa=true but no machines are named"),
    (["launch.require_efa=true", "cluster.instance=g5.2xlarge"], "g5.2xlarge has no EFA"),
    (
        ["launch.kubernetes.efa=5", "cluster.instance=p4d.24xlarge"],
        "launch.kubernetes.efa=5, but p4d.24xlarge has 4 EFA interfaces.",
    ),
    (
        ["launch.kubernetes.efa=0", "launch.require_efa=true", "cluster.instance=p4d.24xlarge"],
        "launch.kubernetes.efa=0, but launch.require_efa=true fails a run without EFA.",
    ),
    (["launch.slurm.container_mounts=[/a:/a]"], "but launch.slurm.container_image is not set"),
    (["launch.kubernetes.etcd=e:2379"], "read only for launch.kubernetes.target=pytorchjob"),
    (
        ["launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd"],
        "launch.kubernetes.etcd=etcd is not host:port. Pods meet there.",
    ),
    (
        [
            "launch.kubernetes.target=pytorchjob",
            "launch.kubernetes.etcd=e:2379",
            "elastic.rendezvous=etcd://f:2379",
        ],
        "etcd=e:2379 and elastic.rendezvous=etcd://f:2379 name two places to meet. Keep one.",
    ),
    (
        [
            "launch.kubernetes.target=pytorchjob",
            "launch.kubernetes.etcd=e:2379",
            "elastic.rendezvous=etcd://e:2379",
        ],
        "etcd=e:2379 and elastic.rendezvous=etcd://e:2379 name two places to meet. Keep one.",
    ),
    (
        [
            "launch.kubernetes.target=pytorchjob",
            "launch.kubernetes.etcd=e:2379",
            "launch.env={ETCDCTL_CERT: /c}",
        ],
        "etcd_secret=e-tls sets ETCDCTL_CERT, and so do launch.env or secrets. Keep one",
    ),
    (["launch.kubernetes.etcd_secret=s"], "read only for launch.kubernetes.target=pytorchjob"),
    (["elastic.rendezvous=etcd"], "elastic.rendezvous=etcd names no place to meet. Use tcp (a po"),
    (["elastic.rendezvous=etcd://a:b"], "'a:b' is not HOST:PORT. Agents ask etcd there."),
    (["elastic.rendezvous=etcd://a:1,"], "'' is not HOST:PORT."),
    (["elastic.rendezvous=etcd://::1"], "an address of IPv6 in brackets"),
    (["elastic.rendezvous=etcd://ann@a:1"], "elastic.rendezvous: names a user before the host"),
    (["launch.kubernetes.runtime=mine"], "read only for launch.kubernetes.target=trainjob"),
    (["launch.kubernetes.topology=required"], "launch.kubernetes.queue is not set"),
    (["cluster.device=gpu"], "cluster.device=gpu is called cuda by torch. Use cuda."),
    (["cluster.device=cuda:0"], "cluster.device='cuda:0'"),
    (
        ["cluster.device=hpu", "cluster.instance=p5.48xlarge"],
        "cluster.device=hpu but p5.48xlarge has H100 SXM, which is cuda. Use auto, or other mach",
    ),
    (["cluster.instance=p5.48xl"], "cluster.instance='p5.48xl' is not in the catalogue"),
]


OWN: dict[str, object] = {
    "model.preset": "null", "model.module": "json:loads", "data.seq_len": 16, "optim.lr": 1e-3,
    "optim.global_batch": 4, "optim.micro_batch": 2,
}  # fmt: skip
"""A recipe with a module of the user's own, found wherever there is Python."""

OF_OWN: list[tuple[dict[str, object], str]] = [
    ({"model.module": "a/b.py"}, "model.module='a/b.py' is not of the form package.module:functi"),
    ({"model.module": "no_such_thing:build"}, "module no_such_thing is neither in"),
    ({"parallel.tp": 2}, "how its matrices may be split is not known. Use dp_replicate and dp_sh"),
    ({"parallel.cp": 2}, "parallel.cp=2: in a module of your own attention would have to exchang"),
    ({"parallel.pp": 2}, "parallel.pp=2: in a module of your own where it can be cut"),
    ({"parallel.ep": 2}, "parallel.ep=2: in a module of your own which of its tensors are experts"),
    ({"data.seq_len": "auto"}, "data.seq_len=auto follows a model's sizes, and those of model.mod"),
    ({"optim.micro_batch": "auto"}, "optim.micro_batch=auto follows a model's sizes"),
    ({"model.weights": "load"}, "the function of model.module gives its model the weights"),
    ({"model.dropout": 0.1}, "Drop in the module."),
    ({"model.router_z_loss": 0.0}, "model.router_z_loss=0.0 weighs a loss of known routers"),
    ({"model.router_aux_loss": 0.0}, "model.router_aux_loss=0.0 weighs a loss of known routers"),
    ({"model.compile": "true"}, "model.compile=true is done block by block, and model.blocks name"),
    ({"memory.recompute": "full"}, "memory.recompute='full' is done block by block"),
    ({"memory.offload": "activations"}, "Use memory.recompute, or memory.offload=optimizer."),
    ({"memory.offload": "params", "parallel.zero": 3}, "=params moves what known blocks hold"),
    ({"memory.loss_chunk": 512}, "=512 makes losses in the head of a known model"),
    ({"precision.compute": "fp8"}, "precision.compute=fp8 multiplies known matrices of a block"),
    ({"task.generate_tokens": 5}, "task.generate_tokens=5 needs logits"),
    (
        {"task.name": "masked_lm", "run.target.masked_accuracy": 0.4},
        "run.target: asks for what only logits tell, and what is inside of model.module is",
    ),
]


@pytest.mark.parametrize(("settings", "words"), OF_OWN)
def test_what_a_module_of_ones_own_cannot_have_says_why(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], [f"{name}={value}" for name, value in {**OWN, **settings}.items()]))
    assert words in str(refused.value)
    assert len(refused.value.problems) == 1


def test_a_module_of_ones_own_may_be_sharded_recomputed_and_compiled() -> None:
    more: dict[str, object] = {
        "model.blocks": "[layers]",
        "memory.recompute": "full",
        "model.compile": "true",
    }
    more |= {"parallel.zero": 1, "task.name": "masked_lm", "precision.compute": "bf16"}
    check(load_recipe([], [f"{name}={value}" for name, value in {**OWN, **more}.items()]))


@pytest.mark.parametrize(("overrides", "words"), PROBLEMS)
def test_a_contradiction_says_what_to_do(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], ["model.preset=llama-tiny", *overrides]))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster.instance=p5.48xlarge", "cluster.nodes=2"],
        ["parallel.strategy=HYBRID_SHARD", "parallel.dp_shard=2", "cluster.devices=4"],
        ["elastic.min_nodes=1", "cluster.nodes=2", "elastic.max_nodes=4"],
        ["optim.name=sgd", "optim.lr=0.1", "optim.momentum=0.9", "optim.nesterov=true"],
        ["optim.name=lamb", "optim.lr=1e-3", "optim.betas=[0.9, 0.999]", "optim.eps=1e-6"],
        ["optim.batch_per_device=2", "optim.lr_scaling=linear", "optim.lr_batch=8"],
        ["optim.schedule=poly", "optim.poly_power=1.0", "optim.warmup_share=0.2843"],
        ["launch.require_efa=true", "cluster.instance=p5.48xlarge"],
        ["launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=e:2379"],
        ["elastic.rendezvous=etcds://a:2379,b,[::1]:2379"],
        ["launch.kubernetes.topology=preferred", "launch.kubernetes.queue=q"],
        ["launch.slurm.container_mounts=[/a:/a]", "launch.slurm.container_image=i"],
        ["secrets={HF_TOKEN: env, WANDB_API_KEY: 'k8s:keys/wandb'}"],
        ["launch.env={TOKENIZERS_PARALLELISM: 'false', AWS_WEB_IDENTITY_TOKEN_FILE: /run/t}"],
    ],
)
def test_a_sound_recipe_passes(overrides: list[str]) -> None:
    check(load_recipe([], ["model.preset=llama-tiny", *overrides]))


def test_all_problems_are_reported_at_once_under_the_name_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match=r"a\.yaml has 3 problems:"):
        check(load_recipe([], ["memory.offload=params", "optim.momentum=0.9"]), "a.yaml")


CREDENTIALS = [
    ("hf_" + "x" * 20, "a Hugging Face token"),
    ("AKIA" + "X" * 16, "an AWS access key"),
    ("ghp_" + "x" * 36, "a GitHub token"),
    ("-----BEGIN PRIVATE KEY-----", "a private key"),
    ("s3://me:passw0rd@host/data", "an address with a password"),
]


@pytest.mark.parametrize(("credential", "kind"), CREDENTIALS)
def test_a_credential_is_refused_and_not_repeated(credential: str, kind: str) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", f"data.source='{credential}'"])
    with pytest.raises(RecipeError) as refused:
        check(recipe)
    assert f"data.source: holds {kind} (not shown)" in str(refused.value)
    assert credential not in str(refused.value)


def test_wrong_values_and_contradictions_are_told_together() -> None:
    wrong = ["model.preset=lama2-7b", "optim.lr=fast", "memory.offload=params", "data.sorce=x"]
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([], wrong)
    paths = {problem.path for problem in refused.value.problems}
    assert paths == {"model.preset", "optim.lr", "memory.offload", "data.sorce"}


def test_a_section_whose_setting_is_misspelt_is_not_said_to_lack_it() -> None:
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([], ["model.preset=7", "run.steps=5"])
    assert [problem.path for problem in refused.value.problems] == ["model.preset"]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_bits_are_compared_between_ranks_of_data_axes_alone(axis: str) -> None:
    overrides = ["elastic.check_bits_every=9", f"parallel.{axis}=2", "cluster.devices=4"]
    with pytest.raises(RecipeError, match=rf"check_bits_every=9 compares .*parallel.{axis}=2 each"):
        load_checked_recipe({"model": {"preset": "llama-tiny"}}, overrides, to_train=False)
