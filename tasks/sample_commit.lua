-- Record how a sampling request ended, if this sampler process still holds it.
-- Reads and writes: inflight of this process, the job, its promise, unfinished:<slug>, depth, queued, files.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 tenant, 5 request id, 6 state: done | failed, 7 content type,
--       8 stowed result, 9 error, 10 category, 11 ttl of the result, 12 tokens read, 13 tokens drawn, 14 microseconds
-- returns {OK, stowed body} | {STALE}
local slug, tenant, request_id = ARGV[1], ARGV[4], ARGV[5]
local member = tenant .. ' ' .. request_id
if redis.call('HDEL', K.inflight(ARGV[2] .. '/' .. ARGV[3]), member) == 0 then
  local kept = redis.call('HGET', K.future(tenant, request_id), 'result')
  -- The same result under the same file name: this very call, sent again by the client library.
  return {kept and kept ~= '' and kept == ARGV[8] and 'OK' or 'STALE'}
end
use_tokens(tenant, tonumber(ARGV[13]), clock())
return {'OK', finish_sample(slug, tenant, request_id,
  {state = ARGV[6], content_type = ARGV[7], result = ARGV[8], error = ARGV[9], category = ARGV[10]}, ARGV[11],
  {samples = 1, prompt_tokens = tonumber(ARGV[12]), sampled_tokens = tonumber(ARGV[13]),
    microseconds = tonumber(ARGV[14])})}
