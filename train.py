"""The run, top to bottom: sample -> score -> admit -> pack -> loss -> step -> sync.

    python train.py                                        # learns to reverse text on a laptop, in about a minute
    python train.py --env arithmetic --steps 60            # another environment
    python train.py my_run.py --lr 2e-4                    # a config file, and a flag that overrides it
    python train.py --ranks 2                              # two processes, a device each (ranks.py)
    python train.py --help                                 # the knobs that apply to the chosen algorithm

What is not here, and where it is: credit assignment (algos/), the formulas of the loss (losses.py), how a token stream
grows out of a conversation (traces.py, renderers/), how groups are dealt, filtered and queued (rollouts.py).
"""

import json
import os
import sys

from command_line import parse
from config import fail

if __name__ == "__main__":
    config, notes = parse(sys.argv[1:])
    from monitor import RunConsole

    console = RunConsole(highlight=False, soft_wrap=True)
    if config.dry_run:
        console.out(json.dumps(config.to_dict(), indent=2))
        console.out("\n".join([config.words(), *notes]))
        raise SystemExit(0)

    # Heavy imports wait until the command line is known to be right, so that --help and mistakes are answered at once.
    import asyncio
    import contextlib
    import shutil
    import signal
    import time
    from collections import deque
    from collections.abc import Callable, Coroutine
    from dataclasses import astuple, replace
    from pathlib import Path
    from typing import Any

    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # until there is a run to end well

    from loading import CANNOT_LOAD, find_device, load_engine, load_renderer, quiet

    quiet()
    from ranks import join, launch

    if config.ranks not in (None, 1) and "WORLD_SIZE" not in os.environ:
        launch(config.ranks, config.grace)

    from checkpoint import (
        NOT_SAVED,
        Snapshot,
        cut_batches,
        find_batches,
        generator_states,
        load,
        newest_whole,
        read_batch,
        save,
        write_batch,
    )
    from config import name_of, require
    from engines import choose_engine
    from engines.remote import RemoteEngine
    from envs import ENVS
    from limits import RunStopped, Stop
    from losses import as_scalars, compute_loss, make_rl_loss, merge, summarize
    from monitor import Bystander, Monitor, check_tracker, claim, cut_records, write_whole
    from packing import Counts, MicroBatch, fill_up, pack
    from policy import OptimizerConfig, Policy, model_path
    from rollouts import Rollouts

    try:
        ranks = join(config.ranks, config.rollout_ranks, config.device)
    except ValueError as error:
        fail(str(error))
    config = replace(config, name=ranks.share(config.name))

    # A name is used once: two runs in one folder would be one unreadable curve.
    run_dir = config.runs_dir / config.name
    if ranks.share(run_dir.exists()) and not config.resume:
        ranks.fail(f"--name {config.name}: {run_dir} exists; choose another name, or --resume it")
    start, damaged = ranks.share(newest_whole(run_dir / "checkpoints") if config.resume else (None, []))
    if damaged and not start:  # to begin anew would cut the records of what was done
        ranks.fail(
            f"--resume: no checkpoint of {run_dir} can be read ({damaged[0]}); choose another name to begin anew"
        )
    own_start = start is not None
    start = start or config.resume_from
    notes += [f"warning: passed over {reason}" for reason in damaged]
    try:
        config.runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        ranks.fail(f"--runs-dir {config.runs_dir}: {error.strerror}")
    console.quiet = not ranks.leads
    console.out("\n".join([*notes, config.words()]))

    runner = asyncio.Runner()
    policy = engine = None
    try:
        device, dtype = find_device(config.device, config.dtype)
        check_tracker(config.track)
        engine_name, why = choose_engine(config.engine, device, config.temperature)
        rl_loss = make_rl_loss(**config.to_dict()["loss"])
        path = model_path(config.model, name_of(ENVS, config.sources[0].env))
        options = {"thinking_retention": config.thinking_retention} | config.renderer_args
        renderer, renderer_words = load_renderer(path, config.renderer, **options)

        # Models that are served elsewhere are asked first: what is wrong with them shows before anything heavy is loaded.
        served: dict[tuple, RemoteEngine] = {}
        for flag, model, needs in config.frozen_models() if ranks.samples and not config.replay else ():
            client = served.setdefault(astuple(model), RemoteEngine(model, flag, renderer, config.seq_len))
            console.out(runner.run(client.preflight(needs, config.seq_len)))

        # The model twice on one device, which take turns there: the engine samples, the policy trains.
        if ranks.trains:
            policy = Policy(
                path,
                OptimizerConfig.of(config),
                config.steps,
                config.temperature,
                device,
                dtype,
                config.checkpoint_activations,
                config.offload_optimizer,
                config.compile,
                ranks.nodes,
                config.lora,
                config.seed,
            )
        snapshot = load(start, policy) if start else Snapshot(0)
        done = f"{start} has done {snapshot.step} already"
        require(config.steps >= snapshot.step + (not config.resume and bool(start)), "steps", config.steps, done)
        if config.replay:
            replayed = find_batches(config.replay, snapshot.step, config.steps, policy.vocabulary)
        elif ranks.samples:
            beside = {
                "top_logprobs": config.head_size,
                "reserved_bytes": policy.moment_bytes if policy else 0,
                "sleep_level": config.sleep_level,
                "ranks": 1 if ranks.apart else ranks.world,
            }
            engine = load_engine(engine_name, path, device, dtype, config.seq_len, **beside)
            why += f"; {engine.memory_share:.0%} of the GPU's memory while it samples" if engine.memory_share else ""
    except CANNOT_LOAD as error:
        ranks.fail(str(error) if str(error).startswith("--") else f"--model {config.model}: {error}")

    def give_up() -> None:
        """A run that never began leaves its name free."""
        if ranks.leads and not config.resume:
            shutil.rmtree(run_dir)

    ranks.barrier()  # where one of them can not begin, nothing is written
    try:
        lock = claim(run_dir) if ranks.leads else contextlib.nullcontext()  # held until this process ends
    except OSError as error:
        ranks.fail(f"--name {config.name}: {run_dir}: {error.strerror}")
    if lock is None:
        ranks.fail(f"--name {config.name}: another process is writing {run_dir}")
    if ranks.leads and config.resume:  # what was written after the checkpoint will be written again
        cut_records(run_dir, snapshot.sizes if own_start else {})
        cut_batches(run_dir / "batches", snapshot.step)
    monitor = Monitor(run_dir, config.steps, console) if ranks.leads else Bystander(ranks.rank)
    where = f" on each of {ranks.world} ranks" if ranks.world > 1 else ""
    samples = f"batches of {config.replay}" if config.replay else f"engine {engine_name} ({why})"
    monitor.note(f"model {path} on {device}{where} in {dtype}; {samples}; {renderer_words}; run {run_dir}")
    rollouts = None
    try:
        if engine is not None:
            rollouts = Rollouts(config, engine, renderer, monitor, lambda model: served[astuple(model)], ranks)
        if start and ranks.leads:
            if rollouts is not None:
                rollouts.load_state_dict(snapshot.state)
                rollouts.queue.waiting = snapshot.waiting
            monitor.note(f"goes on from {start}, after step {snapshot.step}")
    except ValueError as error:
        give_up()
        culprit = f"--resume-from {start}" if start else f"--env {name_of(ENVS, config.sources[0].env)}"
        ranks.fail(str(error) if str(error).startswith("--") else f"{culprit}: {error}")
    try:
        if ranks.leads:
            write_whole(run_dir / "config.json", json.dumps(config.to_dict(), indent=2))
    except OSError as error:
        give_up()
        ranks.fail(f"--runs-dir {config.runs_dir}: {error.strerror}")

    stop = Stop(config.grace, monitor.note, alone=ranks.world == 1)
    ranks.listen(stop)

    def together(coroutine: Callable[[], Coroutine]) -> Any:
        """What the lead makes of the others' rollouts and its own; nothing on the other ranks, which play what it deals."""
        return ranks.together(runner, coroutine, rollouts and rollouts.play_share)

    def train(step: int, micro_batches: list[MicroBatch], counts: Counts) -> tuple[dict, dict, float]:
        """One optimizer step, on this rank's micro batches: their summaries, what the update says of itself, and seconds."""
        began, summaries = time.perf_counter(), []
        for micro_batch in micro_batches:
            micro_batch = micro_batch.to(device)
            logprobs, entropy, head_logprobs = policy(micro_batch)
            loss, summary = compute_loss(micro_batch, logprobs, counts.denominators(), rl_loss, head_logprobs)
            loss.backward()
            summaries.append(summary | {"entropy/mean": summarize(entropy[micro_batch.loss_mask])})
        with stop.held():
            updated = policy.step(step)
        return merge(summaries), updated, time.perf_counter() - began

    def say(results: list[tuple[dict, dict, float]], counts: Counts) -> dict[str, float]:
        """Metrics of a step from what all ranks give that train."""
        summaries, updates, seconds = zip(*results, strict=True)
        monitor.spent("train", max(seconds))
        packed = {"pack/fill": counts.tokens / counts.slots, "pack/cut": float(counts.cut)}
        return updates[0] | as_scalars(merge(summaries)) | packed | {"perf/trained_tokens": counts.tokens}

    def sync(version: int) -> None:
        """The engine wakes with the new weights; what is sampled from here on comes from them."""
        with monitor.phase("sync"):
            weights = ranks.weights(policy)
            if engine is not None:
                engine.load_weights(weights, version)
            else:
                deque(weights, maxlen=0)

    def take(step: int, ahead: tuple | None) -> Snapshot:
        """What the run would go on from after this step; it is the lead who knows."""
        if not ranks.leads:
            return Snapshot(step)
        waiting = list(rollouts.queue.waiting)
        state, sizes = rollouts.state_dict(), monitor.sizes()
        return Snapshot(step, state, waiting, ahead, sizes, generator_states(), monitor.tracked)

    def save_checkpoint() -> None:
        stop.in_time()
        try:
            folder = save(run_dir / "checkpoints", snapshot, policy, renderer.tokenizer, config.keep, ranks)
        except NOT_SAVED as error:
            monitor.warn(
                f"step {snapshot.step} could not be saved: {str(error).strip().splitlines()[-1]}; make room, "
                "and --resume goes on from the newest checkpoint"
            )
            raise SystemExit(1) from None
        if stop.asked:
            where = "" if config.runs_dir == Path("runs") else f" --runs-dir {config.runs_dir}"
            monitor.note(f"saved {folder}; go on with: python train.py --name {config.name}{where} --resume")

    def is_eval_step(step: int) -> bool:
        return config.eval_every > 0 and (step % config.eval_every == 0 or step == config.steps)

    exit_code = 0
    with contextlib.closing(monitor), runner, lock:
        try:
            try:
                if rollouts is not None:
                    runner.run(rollouts.setup())
                    engine.sleep()  # weights always arrive while the engine holds nothing else: on a GPU there is no room for both
                if not config.replay:
                    sync(snapshot.step)
            except (ValueError, RunStopped) as error:
                give_up()
                ranks.fail(str(error))
            tracked = snapshot.tracked if own_start else {}
            monitor.track(config.track, config.to_dict(), tracked, snapshot.step + 1 if start else 0)
            if config.replay:
                for step, folder in replayed:
                    micro_batches, counts = read_batch(folder)
                    micro_batches, counts = ranks.deal(fill_up(micro_batches, len(ranks.train)), counts)
                    results = ranks.gather(train(step, micro_batches, counts))
                    if ranks.leads:
                        monitor.log(step, say(results, counts))
                    if ranks.any(bool(stop.asked)):
                        break
                raise SystemExit(128 + stop.asked if stop.asked else 0)
            if not start and is_eval_step(0):
                metrics = together(lambda: rollouts.evaluate(0))
                if ranks.leads:
                    monitor.log(0, metrics)
            ahead, out_of_rollouts = snapshot.ahead, None
            snapshot = take(snapshot.step, ahead)

            for step in range(snapshot.step + 1, config.steps + 1):
                # Rollouts come from the engine; credit is assigned, and rollouts without a signal are dropped, in here.
                batch = ahead if ranks.share(ahead is not None) else together(lambda step=step: rollouts.collect(step))
                branches, metrics = batch or ([], {})
                ahead, result = None, None
                with monitor.phase("train"):
                    packed = pack(branches, config.seq_len, config.micro_batch_tokens, len(ranks.train))
                    if config.dump_batches and ranks.leads and packed[1].tokens:
                        write_batch(run_dir / "batches", step, *packed)
                    micro_batches, counts = ranks.deal(*packed)
                if ranks.apart and ranks.trains and counts.tokens:  # while the others sample the next batch
                    result = train(step, micro_batches, counts)

                # With overlap the next batch is sampled before this one changes the weights: the order of events of ranks
                # that sample while others train.
                if config.overlap and step < config.steps and not ranks.any(bool(stop.asked)):
                    try:
                        ahead = together(lambda step=step: rollouts.collect(step + 1))
                    except RunStopped as error:
                        out_of_rollouts = error  # the batch at hand is whole, and trained on first
                    except KeyboardInterrupt as error:
                        if not ranks.apart:
                            raise
                        out_of_rollouts = error  # it is trained on already

                if not ranks.apart:
                    engine.sleep()
                    if counts.tokens:
                        result = train(step, micro_batches, counts)
                results = [result for result in ranks.gather(result) if result is not None]
                if results:
                    metrics |= say(results, counts)
                elif ranks.leads:
                    monitor.warn(f"step {step}: none of its rollouts carries a signal, so there is no optimizer step")
                sync(step)

                last = step == config.steps or ranks.any(bool(stop.asked or out_of_rollouts))
                in_haste = isinstance(out_of_rollouts, KeyboardInterrupt)
                if not in_haste and (is_eval_step(step) or (last and config.eval_every)):
                    metrics |= together(lambda step=step: rollouts.evaluate(step)) or {}
                with stop.held():
                    if ranks.leads:
                        monitor.log(step, metrics)
                    snapshot = take(step, ahead)
                if config.save_every and (last or step % config.save_every == 0):
                    save_checkpoint()
                if out_of_rollouts:
                    raise out_of_rollouts
                if last:
                    break
        except RunStopped as error:
            monitor.note(f"stopped: {error}")
            if config.save_every and snapshot.step:
                save_checkpoint()
            exit_code = 1
        except KeyboardInterrupt:
            monitor.note("interrupted")
            done = ranks.any(policy is not None and policy.trained > snapshot.step)
            if config.save_every and (done or snapshot.step):
                if done:  # the step, but for its evaluation
                    if ranks.leads:
                        monitor.log(step, metrics)
                    snapshot = take(step, ahead)
                save_checkpoint()
            exit_code = 128 + (stop.asked or signal.SIGTERM)
        finally:
            stop.in_time()
            with contextlib.suppress(Exception, KeyboardInterrupt):
                runner.run(rollouts.close())
                for client in served.values():
                    runner.run(client.disconnect())
            if engine is not None:
                engine.close()
    console.out(f"run written to {run_dir}")
    raise SystemExit(exit_code)
