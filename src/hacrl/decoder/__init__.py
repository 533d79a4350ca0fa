"""Fast training and sampling with ordinary transformers decoders and their own weights.

Every recent decoder of transformers passes its queries, keys and values to a registered attention function.
Ours (`attention.py`) knows which tokens belong together; all other layers work token by token and do not depend on
how tokens are arranged. So one mechanism serves packed training batches (`packing.py`) and sampling with a shared,
static cache, for any architecture, without changing its code.
"""

from hacrl.decoder.backbone import Backbone, CannotDrive

__all__ = ["Backbone", "CannotDrive"]
