"""Fast paths through ordinary transformers decoders, on their own weights.

Every recent decoder of transformers hands its queries, keys and values to a registered attention function.
Ours (`attention.py`) knows how tokens belong together; all other layers work token by token and do not care how
tokens are arranged. So one mechanism serves packed training batches (`packing.py`) and sampling with a shared,
static cache (`cache.py`), for any architecture, without touching its code.
"""

from hacrl.decoder.backbone import Backbone, CannotDrive

__all__ = ["Backbone", "CannotDrive"]
