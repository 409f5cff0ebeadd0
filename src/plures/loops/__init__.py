"""Stages in other people's training loops: the few lines that stand between a stage and a trainer."""
