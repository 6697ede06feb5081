"""Finding: every version that was asked for, and the one that answers a request."""

from collections.abc import Iterator, Mapping

from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.lifecycle import State, VersionRecord
from ortserve.registry.served import ServedModel


class Catalog:
    """Records by model and version, and the routes of requests. Loop thread only.

    Of a version that is loaded anew while the old load serves, the record here is the one that serves.
    """

    def __init__(self) -> None:
        self._records: dict[str, dict[int, VersionRecord]] = {}
        self._serving: dict[tuple[str, str], ServedModel] = {}
        self.is_whole = False
        """Whether all that is served from the start was asked for; until then no model is unknown for good."""

    def find(self, name: str, version: str) -> ServedModel:
        """The version that answers: the one named, or the highest that is ready.

        Args:
            name: Of the model.
            version: A number without leading zeros, or ``""`` for any.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._serving.get((name, version))
        if served is not None:
            return served
        raise self._refusal(name, version)

    def knows(self, name: str) -> bool:
        """Whether the model was ever asked for."""
        return name in self._records

    def names(self) -> list[str]:
        """The models that are known, in the order they came."""
        return list(self._records)

    def of(self, name: str) -> Mapping[int, VersionRecord]:
        """A model's records by version; none for an unknown one."""
        return self._records.get(name, {})

    def records(self) -> Iterator[VersionRecord]:
        """Every version that was asked for; a model that could not even be read counts as version 0."""
        for records in self._records.values():
            yield from records.values()

    def ready(self, name: str) -> list[VersionRecord]:
        """The versions of a model that serve now, ascending."""
        return sorted(
            (record for record in self.of(name).values() if record.state is State.READY),
            key=lambda record: record.version,
        )

    def put(self, record: VersionRecord) -> VersionRecord | None:
        """Show a record, in the place of the one before, which is returned."""
        records = self._records.setdefault(record.model, {})
        before = records.get(record.version)
        records[record.version] = record
        return before

    def drop(self, record: VersionRecord) -> None:
        """Forget a record; the model stays known."""
        del self._records[record.model][record.version]

    def route(self, name: str) -> None:
        """Point requests for a model at its ready versions, and those without a version at the highest."""
        for key in [key for key in self._serving if key[0] == name]:
            del self._serving[key]
        for record in self.ready(name):
            assert record.served is not None
            self._serving[name, str(record.version)] = record.served
            self._serving[name, ""] = record.served

    def _refusal(self, name: str, version: str) -> ServeError:
        records = self._records.get(name)
        if records is None and not self.is_whole:
            text = f"Request for unknown model: '{name}' is not at ready state: the server is still loading its models"
            return ServeError(ErrorKind.NOT_READY, text, retry_after_s=1)
        if records is None:
            return ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version:
            record = next((record for record in records.values() if record.label == version), None)
            if record is None:
                return ServeError(
                    ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found"
                )
            asked = [record]
            text = f"Request for unknown model: '{name}' version {version} is not at ready state"
        else:
            asked = list(records.values())
            text = f"Request for unknown model: '{name}' has no available versions"
        # What was unloaded on purpose is not coming back by itself: no use in trying again.
        if all(record.is_unloaded for record in asked):
            return ServeError(ErrorKind.NOT_FOUND, f"{text}: it was unloaded")
        told = "; ".join(f"{record.state.name}{f' ({why})' if (why := record.explanation) else ''}" for record in asked)
        return ServeError(ErrorKind.NOT_READY, f"{text}: {told}", retry_after_s=1)
