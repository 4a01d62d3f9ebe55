-- Close gaps that have stood too long, by the store's clock: each missing operation becomes a failed one.
-- A gap is closed from its end to its start, so that one which is too wide for one call goes on standing, with its age,
-- until the next. A gap of a session that is silent or finished waits longer: its client may be on its way back.
-- Reads gaps, runs, sessions; writes journals, promises, ready:<slug>, gaps, depth.
-- ARGV: 1 timeout, 2 timeout without a live session, 3 a session is silent after, 4 ttl of results,
--       5 most operations to close, 6 the widest gap
-- returns the number closed
local now, closed, most, widest = clock(), 0, tonumber(ARGV[5]), tonumber(ARGV[6])

local function lives(tenant, session_id)
  local session = redis.call('HMGET', K.session(tenant, session_id), 'last_seen', 'finished')
  return session[1] and not session[2] and now - session[1] < tonumber(ARGV[3])
end

-- Return the first number from `next` on that is there, or the one where the widest gap ends.
local function gap_end(journal, next)
  local last = next + widest
  while next < last and redis.call('HEXISTS', journal, string.format('%d', next)) == 0 do
    next = next + 1
  end
  return next
end

local function close(tenant, run_id, slug, number)
  local seq = string.format('%d', number)
  local error, request_id = 'seq ' .. seq .. ' never arrived', run_id .. ':' .. seq
  enter(tenant, run_id, slug, seq, {kind = 'missing', digest = '', submitted = now, size = '0',
    outcome = error, voids = '1'})
  redis.call('HSET', K.future(tenant, request_id), 'kind', 'missing', 'model_id', run_id, 'submitted', now)
  finish(tenant, request_id,
    {state = 'failed', content_type = '', result = '', error = error, category = 'user'}, now, ARGV[4])
end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', K.GAPS, '-inf', now - ARGV[1])) do
  if closed >= most then
    break
  end
  local tenant, run_id = string.match(member, '^(%S+) (.+)$')
  local run = redis.call('HMGET', K.run(tenant, run_id), 'slug', 'applied', 'session')
  if now - redis.call('ZSCORE', K.GAPS, member) >= tonumber(ARGV[2]) or lives(tenant, run[3]) then
    local first = run[2] + 1
    local number = gap_end(K.journal(tenant, run_id), first) - 1
    while number >= first and closed < most do
      close(tenant, run_id, run[1], number)
      number, closed = number - 1, closed + 1
    end
    place(tenant, run_id, now)
  end
end
return closed
