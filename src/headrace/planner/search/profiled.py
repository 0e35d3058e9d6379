"""What there is to build with where steps were measured: instances as they were profiled, one device each. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.bench.metrics import Slo
from headrace.planner.costs.roofline import Device, Sharding
from headrace.planner.profile import Profile, kv_of, steps_of
from headrace.planner.scenario import Role
from headrace.planner.search.candidate import Candidate, Kind, Pool, Surroundings
from headrace.planner.search.site import Lengths, most_rows

CHUNKS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSite:
    """`device`: what one of the profile's instances ran on; its name, price and power count, not its peaks."""

    profile: Profile
    device: Device
    lengths: Lengths
    slo: Slo

    def colocated(self) -> Iterator[Candidate]:
        for chunk_tokens in CHUNKS:
            kind = self._kind("colocated", chunk_tokens)
            if kind is not None:
                yield self._candidate(kind)

    def split(self) -> Iterator[Candidate]:
        prefiller, decoder = (self._kind(role, None) for role in ("prefiller", "decoder"))
        if prefiller is not None and decoder is not None:
            yield self._candidate(prefiller, decoder)

    def _candidate(self, *kinds: Kind) -> Candidate:
        profile = self.profile
        return Candidate(
            pools=tuple(Pool(kind=kind, count=1) for kind in kinds),
            kv=kv_of(profile),
            around=Surroundings(
                routed=profile.link.model,
                same_host=None,
                gateway_s=profile.gateway_s,
                hand_over_s=profile.hand_over_s,
            ),
        )

    def _kind(self, role: Role, chunk_tokens: int | None) -> Kind | None:
        """None: it was not measured, has no room, or no step is short enough."""
        told = self.profile.steps.get(role)
        if told is None or told.num_pages * self.profile.page_size < self.lengths.longest:
            return None
        steps = steps_of(self.profile, role)
        rows = told.max_running
        if role != "prefiller":
            rows = most_rows(steps, self.lengths, self.slo.tpot_s, most=told.max_running)
        if not rows:
            return None
        return Kind(
            role=role,
            device=self.device.name,
            sharding=Sharding(),
            steps=steps,
            num_pages=told.num_pages,
            page_size=self.profile.page_size,
            chunk_tokens=chunk_tokens or told.chunk_tokens,
            max_running=rows,
            tpot_s=self.slo.tpot_s if role == "decoder" else None,
            price_hour=self.device.price_hour,
            watts=self.device.watts,
            per_host=self.device.per_host,
        )
