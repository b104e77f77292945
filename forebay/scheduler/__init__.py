"""The batch scheduler of one worker: who runs in the next step. No torch, no clock, no I/O."""
