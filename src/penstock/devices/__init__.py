"""What a storage device can do, measured or assumed."""

from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.devices.throttle import Throttle

__all__ = ["PRESETS", "DeviceProfile", "Throttle"]
