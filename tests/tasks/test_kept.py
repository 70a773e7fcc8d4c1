"""What building a task keeps in the user's cache: it changes no byte, and is never stale."""

import gzip
import lzma
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from anyfleet import cache, methods, rng
from anyfleet.elastic import Blueprint, cost, traced
from anyfleet.elastic import traced as _traced_function
from anyfleet.elastic.cost import memory
from anyfleet.experiment import Experiment, play
from anyfleet.methods.fedavg import Training
from anyfleet.tasks import Dirichlet, Embedded, FashionMnist, Task
from anyfleet.tasks import data_loading
from anyfleet.tasks.idx import read_idx
from anyfleet.world import levels
from tests.helpers import small
from tests.helpers.sets import write_idx
