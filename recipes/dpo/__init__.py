"""Preference optimization on pairs or labeled responses: DPO, IPO, SimPO, ORPO, CPO and KTO."""
