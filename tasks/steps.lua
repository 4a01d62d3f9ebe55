-- Put before every script, after keys.lua: what several of them do in the same way.

-- The number of each kind of record that scripts write, as `schema.py` says them (a test compares).
local SCHEMA = {entry = 1, future = 1, sample = 1}

-- Say what a tenant has of something now, as its account has it.
local function has(tenant, name)
  return tonumber(redis.call('HGET', K.account(tenant), name) or 0)
end

-- Change what a tenant has of something.
local function add(tenant, name, change)
  if change ~= 0 and redis.call('HINCRBY', K.account(tenant), name, string.format('%.0f', change)) <= 0 then
    redis.call('HDEL', K.account(tenant), name)
  end
end

-- Say what a tenant may have of something: its own quota, else everybody's. 0 is no limit.
local function quota(tenant, name)
  return tonumber(redis.call('HGET', K.quota(tenant), name) or redis.call('HGET', K.QUOTAS, name) or 0)
end

-- Say how many tokens a tenant may use at this moment, and how many in a minute. What was used beyond that is a debt,
-- a negative number, and goes with time. nil: no limit.
local function tokens_left(tenant, now)
  local most = quota(tenant, 'tokens_per_minute')
  if most <= 0 then
    return nil
  end
  local known = redis.call('HMGET', K.account(tenant), 'tokens', 'tokens_at')
  return math.min(most, (known[1] or most) + (now - (known[2] or now)) * most / 60), most
end

-- Take tokens from what a tenant may use in this minute.
local function use_tokens(tenant, tokens, now)
  local left = tokens > 0 and tokens_left(tenant, now)
  if left then
    redis.call('HSET', K.account(tenant), 'tokens', string.format('%.3f', left - tokens), 'tokens_at', now)
  end
end

-- Say all that a tenant has on disk: checkpoints and versions for samplers, results in files, bodies that wait.
local function bytes_of(tenant)
  return has(tenant, 'stored') + has(tenant, 'spooled') + tonumber(redis.call('GET', K.queued(tenant)) or 0)
end

-- Tell that something is over a quota. What is refused so has changed nothing.
local function over(name, most, use, more)
  return string.format('QUOTA %s %.0f %.0f %.0f', name, most, use, more or 1)
end

-- Tell whether a tenant's bytes would be over its quota with so many more; returns the answer, or nil.
local function over_bytes(tenant, more)
  local most = quota(tenant, 'stored_bytes')
  local use = most > 0 and bytes_of(tenant)
  return use and use + more > most and over('stored_bytes', most, use, more) or nil
end

-- Count runs that take up one of a tenant's places, up to `most`: those that work, and those whose session is neither
-- finished nor silent for as long as `silent_s`.
local function live_runs(tenant, now, silent_s, most)
  local live, lives = 0, {}
  for _, run_id in ipairs(redis.call('ZREVRANGE', K.runs(tenant), 0, -1)) do
    local run = redis.call('HMGET', K.run(tenant, run_id), 'session', 'state', 'pending')
    local id = run[1] or ''
    if lives[id] == nil then
      local session = redis.call('HMGET', K.session(tenant, id), 'last_seen', 'finished')
      lives[id] = session[1] and not session[2] and now - session[1] < tonumber(silent_s)
    end
    if tonumber(run[3] or 0) > 0 or (lives[id] and run[2] ~= 'failed' and run[2] ~= 'copied') then
      live = live + 1
    end
    if live >= most then
      break
    end
  end
  return live
end

-- Count what was used, in the hour in which it ended. `of` says of what: slug, session, and run or '-'.
local function note_usage(tenant, now, of, amounts)
  local hour = K.usage(tenant, string.format('%d', math.floor(now / 3600)))
  for name, amount in pairs(amounts) do
    if amount > 0 then
      redis.call('HINCRBY', hour, name .. ' ' .. of, string.format('%.0f', amount))
    end
  end
  redis.call('EXPIRE', hour, 34560000)  -- 400 days
end

-- Keep a file of the spool until then. Its tenant and its size are in its name.
local function keep_file(file, till)
  if redis.call('ZADD', K.FILES, till, file) == 1 then
    local tenant, size = string.match(file, '^@spool/([^/]+)/.*%-(%d+)$')
    if tenant then
      add(tenant, 'spooled', tonumber(size))
    end
  end
end

-- Return the base model's slug of a full run's pool; nil where the slug is a base model's own.
local function base_of(slug)
  local base, digits = string.match(slug, '^(.+)%.f%-(%x+)$')
  return base and #digits == 16 and base or nil
end

-- Note that a full run's pool has something to do.
local function note_pool(slug, tenant, run_id)
  local base = base_of(slug)
  if base then
    redis.call('HSET', K.pools(base), slug, tenant .. ' ' .. run_id)
  end
end

-- Forget a full run's pool once it has nothing to do.
local function tidy_pool(slug)
  local base = base_of(slug)
  if base and redis.call('EXISTS', K.depth('train', slug), K.depth('sample', slug), K.unloads(slug)) == 0 then
    redis.call('HDEL', K.pools(base), slug)
    redis.call('DEL', K.served(slug))
  end
end

-- Count operations acknowledged and not finished, of one tenant.
local function count(kind, slug, tenant, change)
  if redis.call('HINCRBY', K.depth(kind, slug), tenant, change) <= 0 then
    redis.call('HDEL', K.depth(kind, slug), tenant)
    tidy_pool(slug)
  end
  add(tenant, 'unfinished', change)
end

-- Count the bytes of bodies accepted and not finished, of one tenant.
local function weigh(tenant, change)
  if change ~= 0 and redis.call('INCRBY', K.queued(tenant), string.format('%d', change)) <= 0 then
    redis.call('DEL', K.queued(tenant))
  end
end

-- Tell whether a body of this size is over what a tenant may have queued. One alone never is.
local function too_much(tenant, size, most)
  local queued = tonumber(redis.call('GET', K.queued(tenant)) or 0)
  return queued > 0 and queued + size > tonumber(most)
end

-- Tell whether a row is that of a full run's version, which later ones may need after the row is gone.
local function is_version(row)
  return (row.weights_digest or '') ~= ''
end

-- Count the bytes of a row that goes no longer: at once, or, of a full run's version, when its directory goes too.
-- `of` as for `note_usage`.
local function discount(tenant, row, directory, of)
  local size = row.size_bytes or 0
  if is_version(row) and string.match(directory, '^tenants/([^/]+)/') == tenant then
    redis.call('HSET', K.held(tenant), directory, string.format('%.0f ', size) .. of)
  else
    add(tenant, 'stored', -size)
  end
end

-- Write a checkpoint's row, or with '' remove it. The directory of a row that goes is noted as dropped, with the time:
-- whoever has just read that row may be about to use it. Everybody finds those whose row says that it is public.
local function put_checkpoint(tenant, run_id, id, row)
  local rows, published = K.checkpoints(tenant, run_id), K.published(run_id)
  local old = redis.call('HGET', rows, id)
  local was, is = old and cjson.decode(old) or {}, row ~= '' and cjson.decode(row) or {}
  add(tenant, 'stored', is.size_bytes or 0)
  if was.directory and was.directory ~= is.directory then
    local slug = redis.call('HGET', K.run(tenant, run_id), 'slug') or '-'
    discount(tenant, was, was.directory, slug .. ' ' .. string.match(run_id, '^[^:]+') .. ' ' .. run_id)
    redis.call('ZADD', K.DROPPED, clock(), was.directory)
  else
    add(tenant, 'stored', -(was.size_bytes or 0))
  end
  if row == '' then
    redis.call('HDEL', rows, id)
  else
    redis.call('HSET', rows, id, row)
  end
  if is.public then
    redis.call('HSET', published, id, tenant)
    redis.call('ZADD', K.PUBLISHED, 'NX', clock(), run_id)
  elseif redis.call('HDEL', published, id) == 1 and redis.call('EXISTS', published) == 0 then
    redis.call('ZREM', K.PUBLISHED, run_id)
  end
end

-- Write the record of a sampler that was made together with its version of the weights.
local function put_sampler(tenant, sampler, record)
  local old = redis.call('HGET', sampler, 'record')
  add(tenant, 'stored', (cjson.decode(record).size_bytes or 0) - (old and cjson.decode(old).size_bytes or 0))
  redis.call('HSET', sampler, 'record', record)
end

-- Tell whether the process that took this lease still holds it.
local function holds(worker, generation)
  return generation ~= '' and redis.call('HGET', K.worker(worker), 'generation') == generation
end

-- Put a run where it belongs now: ready with its next operation, or standing before a gap, or neither.
local function place(tenant, run_id, now)
  local run = redis.call('HMGET', K.run(tenant, run_id), 'slug', 'applied', 'pending')
  local slug, member = run[1], tenant .. ' ' .. run_id
  local head = redis.call('HGET', K.journal(tenant, run_id), string.format('%d', run[2] + 1))
  if head then
    redis.call('ZADD', K.ready(slug), cjson.decode(head).submitted, member)
  else
    redis.call('ZREM', K.ready(slug), member)
  end
  if not head and tonumber(run[3]) > 0 then
    redis.call('ZADD', K.GAPS, 'NX', now, member)
  else
    redis.call('ZREM', K.GAPS, member)
  end
end

-- Write the journal's header of one operation and count it.
local function enter(tenant, run_id, slug, seq, header)
  header.schema = SCHEMA.entry
  redis.call('HSET', K.journal(tenant, run_id), seq, cjson.encode(header))
  redis.call('HINCRBY', K.run(tenant, run_id), 'pending', 1)
  count('train', slug, tenant, 1)
  note_pool(slug, tenant, run_id)
  weigh(tenant, tonumber(header.size))
end

-- Bytes of a body and of a result that are told of along with a wake-up; of longer ones only that they are there.
local TOLD_BODY, TOLD_RESULT = 16384, 8192

-- Keep a promise: write how it ended, let it expire, tell who waits; what is short is told as a whole.
-- `ending`: {state, content_type, result (stowed), error, category}
local function finish(tenant, request_id, ending, now, ttl_s)
  local future = K.future(tenant, request_id)
  redis.call('HSET', future, 'schema', SCHEMA.future, 'state', ending.state, 'content_type', ending.content_type,
    'result', ending.result, 'error', ending.error, 'category', ending.category, 'finished', now)
  redis.call('PEXPIRE', future, math.floor(ttl_s * 1000))
  if string.sub(ending.result, 1, 1) == '@' then
    keep_file(ending.result, now + ttl_s)
  end
  local told = tenant .. ' ' .. request_id
  if #ending.result <= TOLD_RESULT and string.sub(ending.result, 1, 1) ~= '@' then
    local of = redis.call('HMGET', future, 'kind', 'model_id', 'submitted')
    told = told .. '\n' .. cjson.encode({schema = SCHEMA.future, state = ending.state, content_type = ending.content_type,
      error = ending.error, category = ending.category, finished = now, kind = of[1] or '', model_id = of[2] or '',
      submitted = of[3] or ''}) .. '\n' .. string.sub(ending.result, 2)
  end
  redis.call('PUBLISH', K.DONE, told)
end

-- Keep the promise that a run is out of memory.
local function unloaded(tenant, run_id, request_id, ttl_s)
  local result = '=' .. cjson.encode({type = 'unload_model', model_id = run_id})
  finish(tenant, request_id,
    {state = 'done', content_type = 'application/json', result = result, error = '', category = ''}, clock(), ttl_s)
end

-- Tell the parts of a sample's request id: its sampler, its number there, and the clone of the client that counted to it.
local function sample_parts(request_id)
  local sampler_id, seq = string.match(request_id, '^(.+:sample:%d+):(%d+)$')
  return sampler_id, seq, seq and #seq > 9 and string.sub(seq, 1, -10) or '0'
end

-- Put an ended sample in line for a client that asks for several at once.
local function line_up(tenant, request_id, ttl_s)
  local sampler_id, _, clone = sample_parts(request_id)
  local done = K.sampler_done(tenant, sampler_id, clone)
  redis.call('ZADD', done, redis.call('INCR', K.completions(tenant)), request_id)
  redis.call('PEXPIRE', done, math.floor(ttl_s * 1000))
end

-- End a sampling request, whoever holds it; `ending` as above, `amounts` of what it used. Returns its stowed body.
local function finish_sample(slug, tenant, request_id, ending, ttl_s, amounts)
  local job = redis.call('HMGET', K.job(tenant, request_id), 'body', 'size', 'of')
  if amounts and ending.state == 'done' then
    note_usage(tenant, clock(), job[3] or (slug .. ' - -'), amounts)
  end
  redis.call('DEL', K.job(tenant, request_id))
  redis.call('ZREM', K.unfinished(slug), tenant .. ' ' .. request_id)
  count('sample', slug, tenant, -1)
  weigh(tenant, -(tonumber(job[2]) or 0))
  line_up(tenant, request_id, ttl_s)
  finish(tenant, request_id, ending, clock(), ttl_s)
  return job[1] or ''
end

-- Give what one sampler process holds back to those who wait, in its old place.
-- With a `ttl_s` that process has died: what has been in the hands of three such ends here.
local function give_back(slug, identity, ttl_s)
  local held = redis.call('HGETALL', K.inflight(identity))
  for i = 1, #held, 2 do
    local tenant, request_id = string.match(held[i], '^(%S+) (.+)$')
    if ttl_s and redis.call('HINCRBY', K.job(tenant, request_id), 'crashes', 1) >= 3 then
      local error = 'the worker died 3 times while running it; it was not tried again'
      local body = finish_sample(slug, tenant, request_id,
        {state = 'failed', content_type = '', result = '', error = error, category = 'server'}, ttl_s)
      if string.sub(body, 1, 1) == '@' then
        keep_file(body, clock())
      end
    else
      redis.call('ZADD', K.waiting(tenant, slug), held[i + 1], request_id)
      redis.call('ZADD', K.turns(slug), 'NX', redis.call('HGET', K.served(slug), tenant) or 0, tenant)
    end
  end
  redis.call('DEL', K.inflight(identity), K.inflight(identity) .. ':call')
  redis.call('SREM', K.claimants(slug), identity)
  return #held / 2
end

-- Fail an operation that nobody has in hand: its number is used up, and it voids as if it had failed by itself.
local function withdraw(tenant, run_id, seq, header, error, ttl_s)
  local now, bodies = clock(), K.bodies(tenant, run_id)
  local body = redis.call('HGET', bodies, seq)
  redis.call('HDEL', bodies, seq)
  if body and string.sub(body, 1, 1) == '@' then
    keep_file(body, now)
  end
  weigh(tenant, -tonumber(header.size))
  redis.call('HSET', K.journal(tenant, run_id), seq, cjson.encode({schema = SCHEMA.entry, kind = 'refused',
    digest = header.digest, submitted = header.submitted, size = '0', outcome = error,
    voids = header.kind == 'forward_backward' and '1' or ''}))
  finish(tenant, run_id .. ':' .. seq,
    {state = 'failed', content_type = '', result = '', error = error, category = 'user'}, now, ttl_s)
end

-- Tell whether an operation waits to be carried out and may be cancelled; returns its header.
local function waits(tenant, run_id, seq, applied)
  local header = tonumber(seq) > tonumber(applied) and redis.call('HGET', K.journal(tenant, run_id), seq)
  header = header and cjson.decode(header)
  local fixed = header and (header.kind == 'refused' or header.kind == 'missing' or header.kind == 'create_model')
  return header and not fixed and header
end

-- Fail the operations of a run whose cancelling was asked for while its owner might have had them in hand.
local function withdraw_all(tenant, run_id, applied)
  local cancels = redis.call('HGETALL', K.cancels(tenant, run_id))
  for i = 1, #cancels, 2 do
    local seq, asked = cancels[i], cjson.decode(cancels[i + 1])
    local header = waits(tenant, run_id, seq, applied)
    if header then
      withdraw(tenant, run_id, seq, header, asked.error, asked.ttl)
    end
  end
  redis.call('DEL', K.cancels(tenant, run_id))
  redis.call('HDEL', K.run(tenant, run_id), 'cancels')
end
