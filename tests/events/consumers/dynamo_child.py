"""Runs under the interpreter that has ai-dynamo-runtime: a SelectionService that is driven by lines of JSON.

    {"worker": 1, "events": "tcp://...", "replay": "tcp://..."}     subscribe to a worker's stream
    {"tokens": [...]}                                               -> blocks in each tier, for every worker
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo.llm import SelectionService

MODEL = "tiny"


async def answer(service: Any, question: dict[str, Any]) -> dict[str, Any]:
    if "worker" in question:
        await service.upsert_worker({
            "worker_id": question["worker"], "model_name": MODEL, "block_size": 16,
            "endpoint": f"http://127.0.0.1:{18000 + question['worker']}",
            "kv_events_endpoints": {0: question["events"]}, "replay_endpoint": question["replay"],
        })  # fmt: skip
        return {}
    scores = await service.overlap_scores({"model_name": MODEL, "token_ids": question["tokens"]})
    rows = scores.get("workers") or scores.get("scores") or []
    return {
        str(row["worker_id"]): [row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"]] for row in rows
    }


async def main() -> None:
    service = SelectionService()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print("ANSWER", json.dumps(await answer(service, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
