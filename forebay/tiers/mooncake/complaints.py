"""Where this tier's repeated errors go."""

from __future__ import annotations

import logging

from forebay.tiers.fs.complaints import Complaints

complain = Complaints(logging.getLogger("forebay.tier.mooncake"))
