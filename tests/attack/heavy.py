"""Import what commands import when they need it: children that are forked afterwards have it at once."""

import huggingface_hub  # noqa: F401
import torch

import plures
import plures.lab.cli.main
import plures.lab.compare.compare
import plures.lab.evaluation.predict
import plures.lab.report
import plures.lab.runs.open
import plures.lab.serving.app
import plures.lab.training.train
from attack.subjects import network

torch.set_num_threads(1)
plures.lab.cli.main.commands()
plures.BatchEnsemble(network())  # its rehearsal imports half of torch's compiler
