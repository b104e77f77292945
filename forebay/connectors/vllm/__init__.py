"""vLLM's door to the store: a KV connector that is loaded by its name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "unix:///run/forebay/store.sock"}}'

Nothing outside of this package imports vLLM.
"""

from __future__ import annotations

from forebay.connectors.vllm.connector import ForebayConnector

__all__ = ["ForebayConnector"]
