"""The run, top to bottom: sample -> score -> admit -> pack -> loss -> step -> sync.

    python train.py                                        # learns to reverse text on a laptop, in about a minute
    python train.py --env arithmetic --steps 60            # another environment
    python train.py my_run.py --lr 2e-4                    # a config file, and a flag that overrides it
    python train.py --help                                 # the knobs that apply to the chosen algorithm

What is not here, and where it is: credit assignment (algos/), the formulas of the loss (losses.py), how a token stream
grows out of a conversation (traces.py, renderers/), how groups are dealt, filtered and queued (rollouts.py).
"""

import json
import sys

from config import fail, parse

if __name__ == "__main__":
    config, notes = parse(sys.argv[1:])
    if config.dry_run:
        print(json.dumps(config.to_dict(), indent=2))
        print("\n".join([config.words(), *notes]))
        raise SystemExit(0)

    # Heavy imports wait until the command line is known to be right, so that --help and mistakes are answered at once.
    import asyncio
    import contextlib
    import shutil
    import signal
    from dataclasses import astuple

    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # until there is a run to end well

    from loading import CANNOT_LOAD, find_device, load_engine, load_renderer, quiet

    quiet()
    from checkpoint import Snapshot, generator_states, load, newest_whole, save
    from config import name_of, require
    from engines import choose_engine
    from engines.remote import RemoteEngine
    from envs import ENVS
    from limits import Stop
    from losses import as_scalars, compute_loss, make_rl_loss, merge, summarize
    from monitor import Monitor, claim, cut_records
    from packing import pack
    from policy import OptimizerConfig, Policy, model_path
    from rollouts import Rollouts, RunStopped

    # A name is used once: two runs in one folder would be one unreadable curve.
    run_dir = config.runs_dir / config.name
    if run_dir.exists() and not config.resume:
        fail(f"--name {config.name}: {run_dir} exists; choose another name, or --resume it")
    start, damaged = newest_whole(run_dir / "checkpoints") if config.resume else (None, [])
    if damaged and not start:  # to begin anew would cut the records of what was done
        fail(f"--resume: no checkpoint of {run_dir} can be read ({damaged[0]}); choose another name to begin anew")
    own_start = start is not None
    start = start or config.resume_from
    notes += [f"warning: passed over {reason}" for reason in damaged]
    try:
        config.runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--runs-dir {config.runs_dir}: {error.strerror}")
    print("\n".join([*notes, config.words()]), flush=True)

    runner = asyncio.Runner()
    try:
        device, dtype = find_device(config.device, config.dtype)
        engine_name, why = choose_engine(config.engine, device, config.temperature)
        rl_loss = make_rl_loss(**config.to_dict()["loss"])
        path = model_path(config.model, name_of(ENVS, config.sources[0].env))
        options = {"thinking_retention": config.thinking_retention} | config.renderer_args
        renderer, renderer_words = load_renderer(path, config.renderer, **options)

        # Models that are served elsewhere are asked first: what is wrong with them shows before anything heavy is loaded.
        served: dict[tuple, RemoteEngine] = {}
        for flag, model, needs in config.frozen_models():
            client = served.setdefault(astuple(model), RemoteEngine(model, flag, renderer, config.seq_len))
            print(runner.run(client.preflight(needs, config.seq_len)), flush=True)

        # The model twice on one device, which take turns there: the engine samples, the policy trains.
        policy = Policy(
            path,
            OptimizerConfig.of(config),
            config.steps,
            config.temperature,
            device,
            dtype,
            config.checkpoint_activations,
            config.offload_optimizer,
            lora=config.lora,
            seed=config.seed,
        )
        snapshot = load(start, policy) if start else Snapshot(0)
        done = f"{start} has done {snapshot.step} already"
        require(config.steps >= snapshot.step + (not config.resume and bool(start)), "steps", config.steps, done)
        beside = {
            "top_logprobs": config.head_size,
            "reserved_bytes": policy.moment_bytes,
            "sleep_level": config.sleep_level,
        }
        engine = load_engine(engine_name, path, device, dtype, config.seq_len, **beside)
        why += f"; {engine.memory_share:.0%} of the GPU's memory while it samples" if engine.memory_share else ""
    except CANNOT_LOAD as error:
        fail(str(error) if str(error).startswith("--") else f"--model {config.model}: {error}")

    def give_up() -> None:
        """A run that never began leaves its name free."""
        if not config.resume:
            shutil.rmtree(run_dir)

    lock = claim(run_dir)  # held until this process ends
    if lock is None:
        fail(f"--name {config.name}: another process is writing {run_dir}")
    if config.resume:  # what was written after the checkpoint will be written again
        cut_records(run_dir, snapshot.sizes if own_start else {})
    monitor = Monitor(run_dir, config.steps)
    (run_dir / "config.json").write_text(json.dumps(config.to_dict(), indent=2))
    monitor.note(f"model {path} on {device} in {dtype}; engine {engine_name} ({why}); {renderer_words}; run {run_dir}")
    try:
        rollouts = Rollouts(config, engine, renderer, monitor, connect=lambda model: served[astuple(model)])
        if start:
            rollouts.load_state_dict(snapshot.state)
            rollouts.queue.waiting = snapshot.waiting
            monitor.note(f"goes on from {start}, after step {snapshot.step}")
    except ValueError as error:
        give_up()
        culprit = f"--resume-from {start}" if start else f"--env {name_of(ENVS, config.sources[0].env)}"
        fail(str(error) if str(error).startswith("--") else f"{culprit}: {error}")

    stop = Stop(config.grace, monitor.note)

    def take(step: int, ahead: tuple | None) -> Snapshot:
        """What the run would go on from after this step."""
        waiting = list(rollouts.queue.waiting)
        return Snapshot(step, rollouts.state_dict(), waiting, ahead, monitor.sizes(), generator_states())

    def save_checkpoint() -> None:
        stop.in_time()
        folder = save(run_dir / "checkpoints", snapshot, policy, renderer.tokenizer, config.keep)
        if stop.asked:
            monitor.note(f"saved {folder}; go on with: python train.py --name {config.name} --resume")

    def is_eval_step(step: int) -> bool:
        return config.eval_every > 0 and (step % config.eval_every == 0 or step == config.steps)

    exit_code = 0
    with contextlib.closing(monitor), runner, lock:
        try:
            try:
                runner.run(rollouts.setup())
                engine.sleep()  # weights always arrive while the engine holds nothing else: on a GPU there is no room for both
                engine.load_weights(policy.weights(), version=snapshot.step)
            except (ValueError, RunStopped) as error:
                give_up()
                fail(str(error))
            if not start and is_eval_step(0):
                monitor.log(0, runner.run(rollouts.evaluate(0)))
            trained, ahead, out_of_rollouts = snapshot.step, snapshot.ahead, None
            snapshot = take(trained, ahead)

            for step in range(snapshot.step + 1, config.steps + 1):
                # Rollouts come from the engine; credit is assigned, and rollouts without a signal are dropped, in here.
                branches, metrics = ahead or runner.run(rollouts.collect(step))
                # With overlap the next batch is sampled before this one changes the weights: the order of events of ranks
                # that sample while others train.
                ahead = None
                if config.overlap and step < config.steps and not stop.asked:
                    try:
                        ahead = runner.run(rollouts.collect(step + 1))
                    except RunStopped as error:
                        out_of_rollouts = error  # the batch at hand is whole, and trained on first

                engine.sleep()
                with monitor.phase("train"):
                    micro_batches, counts = pack(branches, config.seq_len, config.micro_batch_tokens)
                    summaries = []
                    for micro_batch in micro_batches:
                        micro_batch = micro_batch.to(device)
                        logprobs, entropy, head_logprobs = policy(micro_batch)
                        loss, summary = compute_loss(
                            micro_batch, logprobs, counts.denominators(), rl_loss, head_logprobs
                        )
                        loss.backward()
                        summaries.append(summary | {"entropy/mean": summarize(entropy[micro_batch.loss_mask])})
                    if micro_batches:
                        with stop.held():
                            metrics |= policy.step(step)
                            trained = step
                        metrics |= as_scalars(merge(summaries))
                        metrics |= {"pack/fill": counts.tokens / counts.slots, "pack/cut": float(counts.cut)}
                        metrics["perf/trained_tokens"] = counts.tokens
                    else:
                        monitor.warn(
                            f"step {step}: none of its rollouts carries a signal, so there is no optimizer step"
                        )
                        trained = step

                # The engine wakes with the new weights; what is sampled from here on comes from them.
                with monitor.phase("sync"):
                    engine.load_weights(policy.weights(), version=step)

                last = step == config.steps or bool(stop.asked or out_of_rollouts)
                if is_eval_step(step) or (last and config.eval_every):
                    metrics |= runner.run(rollouts.evaluate(step))
                with stop.held():
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
            if config.save_every and trained:
                save_checkpoint()
            exit_code = 1
        except KeyboardInterrupt:
            monitor.note("interrupted")
            if config.save_every and trained:
                if trained > snapshot.step:  # the step was done but for its evaluation
                    monitor.log(trained, metrics)
                    snapshot = take(trained, ahead)
                save_checkpoint()
            exit_code = 128 + stop.asked
        finally:
            stop.in_time()
            with contextlib.suppress(Exception, KeyboardInterrupt):
                runner.run(rollouts.close())
                for client in served.values():
                    runner.run(client.disconnect())
            engine.close()
    monitor.console.print(f"run written to {run_dir}", markup=False)
    raise SystemExit(exit_code)
