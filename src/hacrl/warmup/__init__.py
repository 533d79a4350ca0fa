"""Supervised warm-up before reinforcement learning: a base model learns the form of answers from written ones."""
