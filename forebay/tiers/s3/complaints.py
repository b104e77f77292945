"""What the S3 tier has to complain of, in its own log and not too often."""

from __future__ import annotations

import logging

from forebay.tiers.fs.complaints import Complaints

log = logging.getLogger("forebay.tier.s3")
complain = Complaints(log)
