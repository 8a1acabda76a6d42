"""Samples and scores on a mesh of simulated devices and on one of them; prints JSON for
test_serving_mesh.py.

    python tests/serving_mesh_run.py

JAX_NUM_CPU_DEVICES=8 must be set before jax starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from model_reference import random_params
from serving_cases import CONFIG, ROW_LENGTH, SERVING, play

from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.placement import serving_mesh
from thundersync_jax.serving.scorer import Scorer
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.messages import ScoreRequest

MODEL = dataclasses.replace(CONFIG, vocab_size=16, num_heads=8, num_kv_heads=8)
# More trajectories than slots, so that rows are parked and come back; some truncate.
NUM_TRAJECTORIES, NUM_TURNS = 7, 3


def samples(mesh: Mesh) -> list[tuple[tuple[int, ...], list[float]]]:
    """Of every trajectory its tokens and the log-probabilities of its turns."""
    engine = PolicyEngine(MODEL, SERVING, ROW_LENGTH, mesh)
    worker = ServingWorker(engine)
    worker.start()
    worker.publish(random_params(MODEL), 0)

    async def main() -> list[Any]:
        async with asyncio.timeout(200):
            turns = (
                play(worker, i, NUM_TURNS, max_tokens=3, top_k=5 * (i % 2))
                for i in range(NUM_TRAJECTORIES)
            )
            return await asyncio.gather(*turns)

    played = asyncio.run(main())
    worker.close()
    return [(ids, [x for r in results for x in r.logprobs]) for ids, results in played]


def scores(mesh: Mesh, contexts: list[tuple[int, ...]]) -> list[float]:
    scorer = Scorer(MODEL, SERVING, ROW_LENGTH, logprob_chunk=8, mesh=mesh)
    scorer.start()
    scorer.publish(random_params(MODEL), 0)

    async def main() -> list[Any]:
        async with asyncio.timeout(200):
            return await asyncio.gather(
                *(
                    scorer.score(
                        ScoreRequest(
                            session=TrajectoryKey(step=0, group=0, index=i),
                            context_ids=context,
                            first=1,
                        )
                    )
                    for i, context in enumerate(contexts)
                )
            )

    results = asyncio.run(main())
    scorer.close()
    return [x for result in results for x in result.logprobs]


def main() -> None:
    meshes = [serving_mesh(MODEL, jax.devices()[:count]) for count in (1, 8)]
    alone, shared = map(samples, meshes)
    contexts = [ids for ids, _ in alone]
    gaps = [np.abs(np.subtract(a, b)).max() for (_, a), (_, b) in zip(alone, shared, strict=True)]
    scored = [scores(mesh, contexts) for mesh in meshes]
    result = {
        "is_same": contexts == [ids for ids, _ in shared],
        "num_distinct": len(set(contexts)),
        "logprob_gap": float(max(gaps)),
        "score_gap": float(np.abs(np.subtract(*scored)).max()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
