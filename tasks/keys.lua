-- Put before every script: the store's names as `keys.py` says them (a test compares), and its clock.
local K = {
  GAPS = 'openrl:gaps', WORKERS = 'openrl:workers', FILES = 'openrl:files', EPOCH = 'openrl:epoch',
  TOKENS = 'openrl:tokens', TENANTS = 'openrl:tenants', DONE = 'openrl:done',
  SIGNS = 'openrl:signs', MADE_ON = 'openrl:made-on',
  PUBLISHED = 'openrl:published', DROPPED = 'openrl:dropped', QUOTAS = 'openrl:quotas', RUNG = 'openrl:rung',
  SCHEMA = 'openrl:schema', KEYS = 'openrl:keys',
}
function K.tenant(tenant, ...) return 'openrl:t:' .. tenant .. ':' .. table.concat({...}, ':') end
function K.sessions(tenant) return K.tenant(tenant, 'sessions') end
function K.session(tenant, id) return K.tenant(tenant, 'session', id) end
function K.session_runs(tenant, id) return K.session(tenant, id) .. ':runs' end
function K.session_samplers(tenant, id) return K.session(tenant, id) .. ':samplers' end
function K.idempotency(tenant, key) return K.tenant(tenant, 'idempotency', key) end
function K.queued(tenant) return K.tenant(tenant, 'queued') end
function K.quota(tenant) return K.tenant(tenant, 'quota') end
function K.account(tenant) return K.tenant(tenant, 'account') end
function K.held(tenant) return K.tenant(tenant, 'held') end
function K.usage(tenant, hour) return K.tenant(tenant, 'usage', hour) end
function K.runs(tenant) return K.tenant(tenant, 'runs') end
function K.run(tenant, id) return K.tenant(tenant, 'run', id) end
function K.journal(tenant, id) return K.run(tenant, id) .. ':journal' end
function K.bodies(tenant, id) return K.run(tenant, id) .. ':bodies' end
function K.cancels(tenant, id) return K.run(tenant, id) .. ':cancels' end
function K.checkpoints(tenant, id) return K.run(tenant, id) .. ':checkpoints' end
function K.published(id) return K.PUBLISHED .. ':' .. id end
function K.sampler(tenant, id) return K.tenant(tenant, 'sampler', id) end
function K.sampler_ops(tenant, id) return K.sampler(tenant, id) .. ':ops' end
function K.completions(tenant) return K.tenant(tenant, 'completions') end
function K.sampler_done(tenant, id, clone) return K.sampler(tenant, id) .. ':done:' .. clone end
function K.future(tenant, id) return K.tenant(tenant, 'future', id) end
function K.job(tenant, id) return K.tenant(tenant, 'job', id) end
function K.waiting(tenant, slug) return K.tenant(tenant, 'waiting', slug) end
function K.pools(base) return 'openrl:pools:' .. base end
function K.ready(slug) return 'openrl:ready:' .. slug end
function K.unloads(slug) return 'openrl:unloads:' .. slug end
function K.turns(slug) return 'openrl:turns:' .. slug end
function K.served(slug) return 'openrl:served:' .. slug end
function K.unfinished(slug) return 'openrl:unfinished:' .. slug end
function K.claimants(slug) return 'openrl:claimants:' .. slug end
function K.inflight(identity) return 'openrl:inflight:' .. identity end
function K.depth(kind, slug) return 'openrl:depth:' .. kind .. ':' .. slug end
function K.queues(kind, slug) return 'openrl:queues:' .. kind .. ':' .. slug end
function K.worker(id) return 'openrl:worker:' .. id end
function K.wake(name) return 'openrl:wake:' .. name end

local function clock()
  local now = redis.call('TIME')
  return string.format('%d.%06d', tonumber(now[1]), tonumber(now[2]))
end
