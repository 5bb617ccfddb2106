"""POLICIES, the table of methods: one file per method, one method per file."""

from penstock.policies.base import SelectionPolicy
from penstock.policies.baselines.arkvale import ArkVale
from penstock.policies.baselines.clusterkv import ClusterKV
from penstock.policies.baselines.flexgen import FlexGen
from penstock.policies.baselines.full import Full
from penstock.policies.baselines.h2o import H2O
from penstock.policies.baselines.infinigen import InfiniGen, InfiniGenStar, InfiniGenStarReuse
from penstock.policies.baselines.leoam import LeoAM
from penstock.policies.baselines.loki import Loki
from penstock.policies.baselines.pqcache import PQCache
from penstock.policies.baselines.quest import Quest
from penstock.policies.baselines.raas import RaaS
from penstock.policies.baselines.shadowkv import ShadowKV
from penstock.policies.baselines.snapkv import SnapKV
from penstock.policies.baselines.streaming_llm import StreamingLLM
from penstock.policies.dynakv import DynaKV
from penstock.policies.hillinfer import HillInfer
from penstock.policies.kvswap import KVSwap
from penstock.policies.louiskv import LouisKV

_ALL: tuple[type[SelectionPolicy], ...] = (
    KVSwap, Full, FlexGen, ShadowKV, Loki, InfiniGenStarReuse, InfiniGenStar, InfiniGen, Quest,
    ArkVale, PQCache, ClusterKV, LeoAM, LouisKV, DynaKV, HillInfer, SnapKV, H2O, RaaS, StreamingLLM,
)  # fmt: skip
POLICIES: dict[str, type[SelectionPolicy]] = {policy.name: policy for policy in _ALL}
"""Every method by the name that the command line uses."""

__all__ = ["POLICIES", "FlexGen", "Full", "KVSwap", "Quest", "SelectionPolicy"]
