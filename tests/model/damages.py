"""Scripts with one thing wrong each: what the machine must find, or it finds nothing."""

from __future__ import annotations

from tests.model.world import Damage

DAMAGES: dict[str, Damage] = {
    "a commit asks for no token": {
        "commit": (("if not run[1] or run[1] ~= token then", "if not run[1] then"),),
    },
    "a claim gives no new token": {
        "take": (("redis.call('INCR', K.TOKENS)", "1"),),
    },
    "order is skipped over a hole": {
        "take": (("    if not header or waits_for_tokens(tenant, header) then\n      break\n    end\n", ""),
                 ("    slice[#slice + 1], slice[#slice + 2], slice[#slice + 3] =",
                  "    if header then slice[#slice + 1], slice[#slice + 2], slice[#slice + 3] ="),
                 ("bring(K.bodies(tenant, run_id), seq)\n", "bring(K.bodies(tenant, run_id), seq) end\n"),),
        "commit": (("if not header or seq ~= run[2] + 1 then", "if not header then"),),
    },
    "a living worker's run is taken": {
        "take": (("(owner == '' or not lives(owner, run[2]))", "true"),),
    },
    "an operation is cancelled in its owner's hands by what follows a commit that was lost": {
        "take": (("if run[8] and ARGV[8] == '1' then", "if false then"),),
    },
    "an operation is cancelled in its owner's hands": {
        "cancel": (("elseif in_hand then", "elseif false then"),),
    },
    "a cancelled forward_backward leaves its gradient counting": {
        "steps": (("voids = header.kind == 'forward_backward' and '1' or ''", "voids = ''"),),
    },
    "an operation is taken twice": {
        "append": (("\nif header then\n", "\nif header and header == '' then\n"),),
    },
    "another operation under a used number is taken for the first": {
        "append": (("elseif header.digest ~= digest then", "elseif false then"),),
    },
    "what is refused counts": {
        "append": (("    return 'KEYREUSED'\n", "    weigh(tenant, 1)\n    return 'KEYREUSED'\n"),),
    },
    "a snapshot trims one too many": {
        "snapshot": (("tonumber(run[4] or -1) + 1, position do", "tonumber(run[4] or -1) + 1, position + 1 do"),),
    },
    "a snapshot asks for no token": {
        "snapshot": (("run[1] ~= ARGV[3] or ", ""),),
    },
    "a snapshot goes back": {
        "snapshot": ((" or position < tonumber(run[3] or -1)", ""),),
    },
    "a stale worker hands back": {
        "release": (("~= ARGV[3] then", "== '' then"),),
    },
    "a closed gap leaves the gradient counting": {
        "close_gaps": (("outcome = error, voids = '1'})", "outcome = error, voids = ''})"),),
    },
    "a commit is not counted": {
        "commit": (("count('train', run[3], tenant, -1)\n", ""),),
    },
    "a gap is forgotten": {
        "steps": (("redis.call('ZADD', K.GAPS, 'NX', now, member)", "redis.call('ZREM', K.GAPS, member)"),),
    },
    "a sample that is given back stays in its hands": {
        "steps": (("redis.call('DEL', K.inflight(identity), K.inflight(identity) .. ':call')\n", ""),),
    },
    "a sample is ended by whom it was taken from": {
        "sample_commit": (("member) == 0 then", "member) == 2 then"),),
    },
    "a cancelled sample stays in line": {
        "sample_cancel": (("redis.call('ZREM', waiting, request_id) == 0",
                           "not redis.call('ZSCORE', waiting, request_id)"),),
    },
    "a line tells of a sample again": {
        "completions": (("redis.call('ZREMRANGEBYSCORE', done, '-inf', ARGV[4])\n", ""),),
    },
    "a dropped version is counted down twice": {
        "sampler_drop": (("redis.call('HSET', sampler, 'dropped', known[1])\n",
                          "add(ARGV[1], 'stored', -1)\nredis.call('HSET', sampler, 'dropped', known[1])\n"),),
    },
}  # fmt: skip
