-- Say what a tenant has of each quota now.
-- ARGV: 1 tenant, 2 a run's session is silent after
-- returns {runs, unfinished operations, bytes stored, tokens of this minute that are used}
local tenant, now = ARGV[1], clock()
local left, most = tokens_left(tenant, now)
return {live_runs(tenant, now, ARGV[2], math.huge), has(tenant, 'unfinished'), string.format('%.0f', bytes_of(tenant)),
  string.format('%.0f', left and most - left or 0)}
