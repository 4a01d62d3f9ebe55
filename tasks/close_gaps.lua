-- Close gaps that have stood too long: each missing operation becomes a failed one.
-- A gap of a session that is silent or finished waits longer: its client may be on its way back.
-- Reads gaps, runs, sessions; writes journals, promises, ready:<slug>, gaps, depth.
-- ARGV: 1 the time to judge by, 2 timeout, 3 timeout without a live session, 4 a session is silent after,
--       5 ttl of results, 6 most operations to close
-- returns the number closed
local judged, now, closed, most = tonumber(ARGV[1]), clock(), 0, tonumber(ARGV[6])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', K.GAPS, '-inf', judged - ARGV[2])) do
  if closed >= most then
    break
  end
  local tenant, run_id = string.match(member, '^(%S+) (.+)$')
  local run = redis.call('HMGET', K.run(tenant, run_id), 'slug', 'applied', 'session')
  local session = redis.call('HMGET', K.session(tenant, run[3]), 'last_seen', 'finished')
  local lives = session[1] and not session[2] and now - session[1] < tonumber(ARGV[4])
  local stood = judged - redis.call('ZSCORE', K.GAPS, member)
  if lives or stood >= tonumber(ARGV[3]) then
    local journal, next = K.journal(tenant, run_id), run[2] + 1
    while closed < most and redis.call('HEXISTS', journal, string.format('%d', next)) == 0 do
      local seq = string.format('%d', next)
      local error = 'seq ' .. seq .. ' never arrived'
      local request_id = run_id .. ':' .. seq
      enter(tenant, run_id, run[1], seq, {kind = 'missing', digest = '', submitted = now, size = '0',
        outcome = error, voids = '1'})
      redis.call('HSET', K.future(tenant, request_id), 'kind', 'missing', 'model_id', run_id, 'submitted', now)
      finish(tenant, request_id,
        {state = 'failed', content_type = '', result = '', error = error, category = 'user'}, now, ARGV[5])
      closed, next = closed + 1, next + 1
    end
    place(tenant, run_id, now)
  end
end
return closed
