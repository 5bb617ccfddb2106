"""One decode step: select, plan, fetch, attend, append. The one place where everything meets."""
