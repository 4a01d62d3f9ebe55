-- Put before every script: the names of one accelerator in the store, its line, its credits, the end of a turn.
-- Times are whole microseconds of the store's clock.
--
-- openrl:accelerators            set: every accelerator that was ever asked for
-- openrl:accelerator:<name>      hash: token (the last one given), owner, seat and holder (none while it is free), state,
--                                granted, heard, busy, waited; floor and multiple of the quantum; released (the last token that its
--                                holder gave back); first, turns, held_total, busy_total since then
--   ...:line                     zset: owner that waits -> since when
--   ...:seen                     hash: owner that waits -> when it last asked
--   ...:credit                   hash: owner -> microseconds that it may still have before others; below zero, owes
--   ...:switches                 list: the last turns that ended, newest first, JSON
--   ...:owner:<owner>            hash with a TTL: turns, waits, waited, longest, held, busy; park and restore as measured
-- channel openrl:accelerator:<name>: something changed, look again
local base = ARGV[1]
local LINE, SEEN, CREDIT, SWITCHES = base .. ':line', base .. ':seen', base .. ':credit', base .. ':switches'
local PATIENCE = 3000000
local KEPT_SWITCHES, KEPT_OWNER_S = 32, 86400

local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end
local now = clock()

-- Write a number of microseconds, or a token, without an exponent.
local function whole(number)
  return string.format('%.0f', number)
end

local function owner_key(owner)
  return base .. ':owner:' .. owner
end

-- Return a field of the accelerator as a number.
local function field(name)
  return tonumber(redis.call('HGET', base, name) or 0)
end

-- Tell whether the present turn has this token.
local function holds(token)
  local turn = redis.call('HMGET', base, 'token', 'owner')
  return turn[2] and turn[1] == token
end

-- Tell whether an owner in the line has asked of late. One that hasn't is stopped, or gone, and doesn't count.
local function asks(owner)
  return tonumber(redis.call('HGET', SEEN, owner) or 0) >= now - PATIENCE
end

-- Return the owners that wait, first come first.
local function waiting()
  local found = {}
  for _, owner in ipairs(redis.call('ZRANGE', LINE, 0, -1)) do
    if asks(owner) then
      found[#found + 1] = owner
    end
  end
  return found
end

-- Return what one of these owners may have at least before it must hand on: a multiple of the dearest switch.
local function quantum(owners)
  local dearest = 0
  for _, owner in ipairs(owners) do
    local cost = redis.call('HMGET', owner_key(owner), 'park', 'restore')
    dearest = math.max(dearest, (cost[1] or 0) + (cost[2] or 0))
  end
  return math.max(field('floor'), field('multiple') * dearest, 1)
end

-- Return every credit as a table.
local function credits()
  local flat, found = redis.call('HGETALL', CREDIT), {}
  for i = 1, #flat, 2 do
    found[flat[i]] = tonumber(flat[i + 1])
  end
  return found
end

-- Say who of `owners` (in order of arrival) is next. As in fairness.py, word for word: a test compares.
local function next_of(owners, credit, share)
  local richest
  for _, owner in ipairs(owners) do
    credit[owner] = credit[owner] or share
    if not richest or credit[owner] > credit[richest] then
      richest = owner
    end
  end
  if credit[richest] <= 0 then
    local rounds = math.floor(-credit[richest] / share) + 1
    for owner in pairs(credit) do
      credit[owner] = math.min(credit[owner] + rounds * share, share)
    end
  end
  return richest
end

-- Keep the credits of those who wait or hold, and of all who were heard of within a day: as in fairness.py, whoever
-- comes and goes would never run out. How much a whole credit is depends on who waits, so none is dropped for being whole.
local function keep(credit, holder, owners)
  local present = {[holder] = true}
  for _, owner in ipairs(owners) do
    present[owner] = true
  end
  redis.call('DEL', CREDIT)
  for owner, left in pairs(credit) do
    if present[owner] or redis.call('EXISTS', owner_key(owner)) == 1 then
      redis.call('HSET', CREDIT, owner, whole(left))
    end
  end
end

-- Say what the present turn has cost those who wait: the time since the first of them came, or since its grant.
local function cost_of(owners, granted)
  if #owners == 0 then
    return 0
  end
  return math.max(0, now - math.max(granted, tonumber(redis.call('ZSCORE', LINE, owners[1]))))
end

-- End the present turn: charge its owner, write it down, tell the others. The token stays, so that the next is larger.
local function finish(how)
  local turn = redis.call('HMGET', base, 'owner', 'granted', 'busy', 'token', 'waited')
  local owner, granted, busy, owners = turn[1], tonumber(turn[2]), tonumber(turn[3] or 0), waiting()
  local present, credit, held = {unpack(owners)}, credits(), math.max(0, now - granted)
  present[#present + 1] = owner
  credit[owner] = (credit[owner] or quantum(present)) - cost_of(owners, granted)
  keep(credit, owner, owners)
  redis.call('HINCRBY', owner_key(owner), 'held', whole(held))
  redis.call('HINCRBY', owner_key(owner), 'busy', whole(busy))
  redis.call('EXPIRE', owner_key(owner), KEPT_OWNER_S)
  redis.call('HINCRBY', base, 'held_total', whole(held))
  redis.call('HINCRBY', base, 'busy_total', whole(busy))
  local cost = redis.call('HMGET', owner_key(owner), 'park', 'restore')
  redis.call('LPUSH', SWITCHES, cjson.encode({
    owner = owner, token = turn[4], how = how, ended = math.floor(now / 1000) / 1000, held_s = held / 1e6,
    busy_s = busy / 1e6, waited_s = (turn[5] or 0) / 1e6, park_s = (cost[1] or 0) / 1e6, restore_s = (cost[2] or 0) / 1e6,
  }))
  redis.call('LTRIM', SWITCHES, 0, KEPT_SWITCHES - 1)
  redis.call('HDEL', base, 'owner', 'seat', 'holder', 'state', 'granted', 'heard', 'busy', 'waited')
  redis.call('PUBLISH', base, 'free')
end
