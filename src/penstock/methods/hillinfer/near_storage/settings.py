"""DeviceSettings: what a near-storage device gets before its first request."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_type_hints

from penstock.core.plain_data import fits
from penstock.kernels.key_rounding import KeyDtype
from penstock.methods.hillinfer.near_storage.protocol import ProtocolError
from penstock.methods.hillinfer.near_storage.shared_memory import Division, section_bytes
from penstock.methods.hillinfer.near_storage.stripes import Stripes

Rule = Literal["attention", "products"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSettings:
    """How cold tokens are scored, wherever that is done.

    Attributes:
        rule: "attention": sums over query heads of the softmax over all tokens; "products": raw
            inner products, added over query heads (HillInfer, section 4.4)
        bits: of the keys that are scored: 8 or 4
        block_tokens: tokens of a score block (the paper's n)
        threads: of one device; 0: as OpenMP says
    """

    rows: int
    max_tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: KeyDtype
    scaling: float
    rule: Rule = "attention"
    bits: int = 8
    block_tokens: int = 1024
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSettings(ScoreSettings):
    """What one scorer process is started with.

    Attributes:
        layers: files of it; layer i's units are in file i
        unit_bytes: payload of a unit: one token's keys and values, keys first
        units: of a layer that this device has, where each token has one
        device_memory: most bytes that the device may hold (`DeviceMemory`); 0: no bound
        directory, direct: where the files are, and how they were opened
        simulate: name of a simulated device (`devices.presets`), or ""
        in_memory: the files are memory
    """

    layers: int
    unit_bytes: int
    units: int
    device_memory: int = 0
    directory: str = ""
    direct: bool = False
    simulate: str = ""
    in_memory: bool = False
    section_bytes: int

    @classmethod
    def of(
        cls, settings: ScoreSettings, *, layers: int, unit_bytes: int, stripes: Stripes,
        simulate: str = "", device_memory: int = 0,
    ) -> "DeviceSettings":  # fmt: skip
        """These score settings for one of the devices, which is yet to get its files."""
        common = {field.name: getattr(settings, field.name) for field in fields(ScoreSettings)}
        tokens = settings.rows * settings.max_tokens
        return cls(
            **common, layers=layers, unit_bytes=unit_bytes, units=stripes.num_local(tokens),
            simulate=simulate, device_memory=device_memory,
            section_bytes=section_bytes(tokens, unit_bytes),
        )  # fmt: skip

    def for_rows(self, rows: int, stripes: Stripes) -> "DeviceSettings":
        """The same for another batch; what it has of a larger one stays."""
        tokens = rows * self.max_tokens
        section = section_bytes(tokens, self.unit_bytes)
        units = max(self.units, stripes.num_local(tokens))
        return replace(self, rows=rows, units=units, section_bytes=section)

    @property
    def division(self) -> Division:
        """How the shared memory is divided."""
        return Division(
            rows=self.rows, max_tokens=self.max_tokens, query_heads=self.query_heads,
            head_dim=self.head_dim, section_bytes=self.section_bytes,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DeviceSettings":
        """The settings in a `Configure` message.

        Raises:
            ProtocolError: a field is missing, unknown or of another type.
        """
        known = get_type_hints(cls)
        if values.keys() != known.keys():
            raise ProtocolError(f"settings differ in {sorted(values.keys() ^ known.keys())}")
        other = [name for name, hint in known.items() if not fits(values[name], hint)]
        if other:
            raise ProtocolError(f"settings of other types in {other}")
        return cls(**values)
