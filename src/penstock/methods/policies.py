"""POLICIES, the table of methods: a folder for each, and one for those that they compare with."""

from penstock.engine.policy import SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.baselines.clusterkv import ClusterKV
from penstock.methods.baselines.flexgen import FlexGen
from penstock.methods.baselines.full import Full
from penstock.methods.baselines.h2o import H2O
from penstock.methods.baselines.infinigen import InfiniGen, InfiniGenStar, InfiniGenStarReuse
from penstock.methods.baselines.leoam import LeoAM
from penstock.methods.baselines.loki import Loki
from penstock.methods.baselines.pqcache import PQCache
from penstock.methods.baselines.quest import Quest
from penstock.methods.baselines.raas import RaaS
from penstock.methods.baselines.shadowkv import ShadowKV
from penstock.methods.baselines.snapkv import SnapKV
from penstock.methods.baselines.streaming_llm import StreamingLLM
from penstock.methods.dynakv.policy import DynaKV
from penstock.methods.hillinfer.policy import HillInfer
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.louiskv.policy import LouisKV
from penstock.methods.policy_table import PolicyTable

_ALL: tuple[type[SelectionPolicy], ...] = (
    KVSwap, Full, FlexGen, ShadowKV, Loki, InfiniGenStarReuse, InfiniGenStar, InfiniGen, Quest,
    ArkVale, PQCache, ClusterKV, LeoAM, LouisKV, DynaKV, HillInfer, SnapKV, H2O, RaaS, StreamingLLM,
)  # fmt: skip
POLICIES = PolicyTable(_ALL)
"""Every method by the name that the command line uses."""
