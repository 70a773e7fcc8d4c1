"""Impossible fields and infeasible requests: the message names the part and a way out."""

from collections.abc import Callable

import numpy as np
import pytest

from anyfleet.tasks.partition import (
    BalancedClasses,
    ByOwner,
    Case1,
    Case2,
    ClassCounts,
    Contiguous,
    Dirichlet,
    DirichletSizes,
    Domains,
    Given,
    Iid,
    LogNormalSizes,
    Mixed,
    Partition,
    SigmaRho,
    TwoClassDisjoint,
    XClass,
)

LABELS = np.repeat(np.arange(4), 10)
OWNERS = np.repeat(np.arange(2), 20)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Iid(samples=0), r"Iid\.samples"),
        (lambda: Iid(share=0.0), r"Iid\.share"),
        (lambda: Iid(share=1.5), r"Iid\.share"),
        (lambda: Iid(samples=5, share=0.5), "not both"),
        (lambda: LogNormalSizes(sigma=-1), "sigma"),
        (lambda: DirichletSizes(alpha=0), "alpha"),
        (lambda: Given(((1, 1),)), r"rows\[0\]"),
        (lambda: Given(((1,), ())), r"rows\[1\]"),
        (lambda: XClass(classes=0), "classes"),
        (lambda: ClassCounts((1, 0)), r"counts\[1\]"),
        (lambda: Mixed(iid=-1), "iid"),
        (lambda: Case1(samples=0), "samples"),
        (lambda: Case2(samples=0), "samples"),
        (lambda: SigmaRho(sigma=-0.1), "sigma"),
        (lambda: SigmaRho(rho=3, samples=200), "multiple of rho"),
        (lambda: TwoClassDisjoint(samples=3), "even"),
        (lambda: BalancedClasses(0), "sigma"),
        (lambda: Dirichlet(alpha=-1), "alpha"),
        (lambda: Dirichlet(minimum=0), "minimum"),
        (lambda: ByOwner(minimum=0), "minimum"),
        (lambda: Domains(share=0), "share"),
    ],
)
def test_an_impossible_field_is_refused(make: Callable[[], Partition], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("part", "devices", "message"),
    [
        (Iid(samples=11), 4, "44 samples"),
        (Iid(), 41, "41 devices"),
        (Iid(), 0, "at least 1"),
        (Contiguous(), 41, "41 devices"),
        (LogNormalSizes(minimum=11), 4, "minimum"),
        (Given(((1,), (40,))), 2, r"rows\[1\]"),
        (Given(((1,),)), 2, "lists 1 devices"),
        (XClass(classes=5), 2, "5 classes"),
        (XClass(classes=1, samples=11), 2, "11 samples where only 10"),
        (ClassCounts((1, 2), samples=5), 3, "lists 2 devices"),
        (Mixed(iid=5, samples=5), 4, "5 iid devices"),
        (Case1(samples=5), 5, "as many devices as classes"),
        (SigmaRho(rho=1, samples=11), 2, "11 samples"),
        (TwoClassDisjoint(samples=10), 9, "class"),
        (BalancedClasses(5), 4, "4 classes"),
        (BalancedClasses(1), 3, "without an owner"),
        (BalancedClasses(4), 11, "11 owners"),
        (Dirichlet(minimum=11), 4, "Raise alpha"),
        (ByOwner(), 3, "only 2 owners"),
        (Domains(users=2, share=1.0), 5, "make 4 devices"),
        (Domains(users=2, share=0.05), 4, "too little"),
    ],
)
def test_an_infeasible_request_says_what_is_missing(
    part: Partition, devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        part(LABELS, devices, key=0, owners=OWNERS)
    assert type(part).__name__ in str(caught.value)


@pytest.mark.parametrize("part", [XClass(), BalancedClasses(), Dirichlet(), TwoClassDisjoint()])
def test_rules_about_classes_refuse_sequences_and_numbers(part: Partition) -> None:
    with pytest.raises(ValueError, match="one class index per row"):
        part(np.zeros((40, 8), np.int64), 2, key=0)
    with pytest.raises(ValueError, match="one class index per row"):
        part(np.zeros(40), 2, key=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [ByOwner(), Domains()])
def test_rules_about_owners_refuse_data_without_owners(part: Partition) -> None:
    with pytest.raises(ValueError, match="natural owners"):
        part(LABELS, 2, key=0)
