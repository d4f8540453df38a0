"""Proposals over HTTP: plans that wait for an approval; see ``telemetry/state/proposals.py``.

The controller makes them and carries them out, so both are tasks in the store. A rejection moves
nothing, and is written at once.
"""

from __future__ import annotations

from typing import Any

from api.http.problems import ProblemType, Refused
from api.http.requests import ProposalRequest
from api.http.schemas import ProposalAnswer, ProposalLine, ProposalsPage, TaskAnswer
from api.http.service import AdminService, page_of
from api.monitor.plan_ends import plan_end
from eplb.policies.table import policy_named
from telemetry.state.proposals import Proposal, ProposalEnded, ProposalState, base_moved, check_open


class Proposals:
    """The proposals of a deployment. Any thread may call any method."""

    def __init__(self, service: AdminService) -> None:
        self._service, self._store = service, service.store

    def page(self, state: ProposalState | None, before: int | None, limit: int) -> ProposalsPage:
        """Those that are kept, below an id, newest first; state None: in any."""
        kept = [
            one
            for one in reversed(self._store.proposals())
            if state in (None, one.state) and (before is None or one.id < before)
        ]
        found, following = page_of(kept, limit, lambda one: one.id)
        return ProposalsPage(
            proposals=[ProposalLine(**_line(one)) for one in found], next=following
        )

    def one(self, proposal_id: int) -> ProposalAnswer:
        """One with its target, moves and explanation.

        Raises:
            Refused: there is no such proposal.
        """
        found, content = self._found(proposal_id), self._store.proposal_content(proposal_id)
        if content is None:
            raise Refused(ProblemType.NO_SUCH_PROPOSAL, f"there is no proposal {proposal_id}")
        end = plan_end(self._store, found.plan_id) if found.plan_id else None
        return ProposalAnswer(
            **_line(found),
            **content.detail,
            slot_to_expert=content.target.slot_to_expert.tolist(),
            slot_share=content.target.slot_share.tolist(),
            plan_end=end,
        )

    def create(self, request: ProposalRequest, by: str) -> ProposalAnswer | TaskAnswer:
        """Have the controller plan and store the plan; the task if it takes longer than the wait.

        Raises:
            Refused: there is nothing to propose, or no load yet to plan on.
            ConfigError: an unknown policy.
        """
        if request.policy is not None:
            policy_named(request.policy)
        asked = request.model_dump(exclude_none=True)
        task = self._service.ask("propose", asked | {"by": by})
        made = task.result.get("proposal")
        return task if made is None else self.one(made)

    def approve(self, proposal_id: int, reason: str, by: str, if_match: str) -> TaskAnswer:
        """Have the controller carry out exactly the stored target.

        Raises:
            Refused: no such proposal, it is not open, its base moved on, movement is off, or a
                migration is open.
        """
        expected = self._service.check_generation(if_match)
        found = self._found(proposal_id)
        try:
            check_open(found)
        except ProposalEnded as exc:
            raise self._ended(found, exc) from exc
        self._service.check_may_move(is_dry_run=False)
        asked: dict[str, Any] = {"proposal": proposal_id, "by": by, "reason": reason}
        return self._service.ask("approve", asked, expected)

    def reject(self, proposal_id: int, reason: str, by: str) -> ProposalLine:
        """End an open proposal.

        Raises:
            Refused: no such proposal, or it is not open.
        """
        found = self._found(proposal_id)
        try:
            return ProposalLine(**_line(self._store.reject(proposal_id, by=by, reason=reason)))
        except ProposalEnded as exc:
            raise self._ended(found, exc) from exc

    def _ended(self, proposal: Proposal, why: ProposalEnded) -> Refused:
        found = self._store.committed()
        serving = None if found is None else (found.placement.generation, found.placement.hash)
        has_moved = proposal.state == "expired" and base_moved(proposal, serving)
        kind = ProblemType.BASE_MOVED_ON if has_moved else ProblemType.PROPOSAL_ENDED
        return Refused(kind, str(why))

    def _found(self, proposal_id: int) -> Proposal:
        for found in self._store.proposals():
            if found.id == proposal_id:
                return found
        raise Refused(ProblemType.NO_SUCH_PROPOSAL, f"there is no proposal {proposal_id}")


def _line(proposal: Proposal) -> dict[str, Any]:
    summary = dict(proposal.summary)
    summary["plan_reason"] = summary.pop("reason")
    shown = ProposalLine.model_fields.keys()
    fields = vars(proposal) | {
        "ended": proposal.ended or None,
        "plan_id": proposal.plan_id or None,
    }
    return {name: value for name, value in (summary | fields).items() if name in shown}
