"""The dataset that a config asks for, checked against the rest of the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch

from paceline.config import RunConfig
from paceline.data import DATASETS
from paceline.data.dataset import DataRequest, Dataset
from paceline.data.own import load_own
from paceline.errors import ConfigError
from paceline.registry import load_user_object


def load_dataset(config: RunConfig) -> Dataset:
    """Load `config.data`, cut to --train-samples and --test-samples; what cannot be, is refused."""
    DATASETS.check(config.data)
    if config.data in DATASETS:
        dataset = DATASETS.load(config.data)(
            DataRequest(
                folder=config.data_dir,
                train_samples=config.train_samples,
                test_samples=config.test_samples,
                resident_limit_bytes=config.resident_limit_mib << 20,
            )
        )
    else:
        function = load_user_object(DATASETS.kind, config.data)
        dataset = load_own(config.data, cast("Callable[[], object]", function))
    dataset = dataclasses.replace(
        dataset,
        train=dataset.train.head(config.train_samples),
        test=dataset.test.head(config.test_samples),
    )
    problems = _check(config, dataset)
    if problems:
        raise ConfigError(problems)
    return dataset


def _check(config: RunConfig, dataset: Dataset) -> list[str]:
    problems = []
    for flag, asked, split in (
        ("--train-samples", config.train_samples, dataset.train),
        ("--test-samples", config.test_samples, dataset.test),
    ):
        if asked is not None and asked > len(split):
            problems.append(
                f"{flag}: must be at most {len(split)}, all that {dataset.name} has, got {asked}"
            )
    samples, batch = len(dataset.train), config.global_batch_size
    if batch > samples:
        flag, limit, given = "--batch-size", samples, batch
        if config.batch_per_worker is not None:
            flag, limit = "--batch-per-worker", samples // config.workers
            given = config.batch_per_worker
        problems.append(
            f"{flag}: must be at most {limit}, for a training set of {samples}, got {given}"
        )
    if config.augment and dataset.train.inputs.dtype != torch.uint8:
        problems.append(f"--augment: needs images of bytes, and {dataset.name} holds floats")
    return problems
