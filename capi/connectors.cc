// The C interface: KV connectors. KvConnector belongs to one thread; here calls of any thread take
// turns, and a thread of the handle's calls progress() whenever there is something to do.
#include <poll.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "capi/agent_handle.h"
#include "kvtransfer/baton_connector.h"
#include "transport/base/durations.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/threads/forks.h"

using baton::Time;
using namespace baton::capi;
using baton::kvtransfer::BatonConnectorOptions;
using baton::kvtransfer::KvBinding;
using baton::kvtransfer::KvConnector;
using baton::kvtransfer::KvJob;
using baton::kvtransfer::KvLoad;

struct baton_kv_connector {
  const baton::base::MadeHere made_here;
  baton::base::EventFd event;   // the caller's
  baton::base::EventFd wanted;  // ends the thread's sleep

  std::mutex mutex;  // of the connector, and of what follows
  std::condition_variable changed;
  std::unique_ptr<KvConnector> connector;
  uint32_t layers = 0;           // of the cache
  std::set<uint64_t> loads;      // that are open
  KvJob job;                     // the last one that was given
  bool changed_by_call = false;  // since the thread looked last
  uint64_t looks = 0;            // of the thread, when something may have got on
  uint64_t waited = 0;           // how many there were when baton_kv_connector_wait() returned last
  bool stop = false;
  std::thread thread;
};

namespace {

void keep_going(baton_kv_connector& handle) {
  const int events = handle.connector->event_fd();
  // Whoever waits is woken by the worker's events, by deadlines, and by calls that change
  // something: not by every look, for a call that only asks whether a load has ended needs one too.
  bool news = true;
  auto due = std::chrono::steady_clock::now();  // the first deadline
  std::unique_lock lock(handle.mutex);
  while (!handle.stop) {
    handle.connector->progress();
    // The clock is read after progress() here and before until_deadline() below, so that a deadline
    // that passes meanwhile, here or in a call, counts as passed.
    const auto now = std::chrono::steady_clock::now();
    news |= std::exchange(handle.changed_by_call, false) || now >= due;
    if (news) ++handle.looks;
    const Time left =
        std::clamp<Time>(handle.connector->until_deadline(), Time::zero(), std::chrono::hours(1));
    due = now + left;
    lock.unlock();
    if (news) {
      handle.changed.notify_all();
      handle.event.ring();
    }
    std::array<pollfd, 2> fds = {pollfd{events, POLLIN, 0}, pollfd{handle.wanted.fd(), POLLIN, 0}};
    const timespec time = baton::base::to_timespec(left);
    ppoll(fds.data(), fds.size(), &time, nullptr);
    news = (fds[0].revents & POLLIN) != 0;
    for (const pollfd& fd : fds) {
      if ((fd.revents & POLLIN) != 0) baton::base::EventFd::silence(fd.fd);
    }
    lock.lock();
  }
}

// Not of a parent: its threads are not there.
bool is_usable(const baton_kv_connector* handle) {
  return handle != nullptr && !handle->made_here.elsewhere();
}

// body(connector, lock), with the lock held.
template <typename Body>
int32_t locked(baton_kv_connector* handle, baton_error* error, Body&& body) {
  return with_own(
      handle, "connector is NULL: pass what baton_kv_connector_create() made",
      "the connector belongs to the process that this one was forked from: make another one", error,
      [&] {
        std::unique_lock lock(handle->mutex);
        return body(*handle->connector, lock);
      });
}

// The same of what may give the thread something to do, or another deadline.
template <typename Body>
int32_t asked(baton_kv_connector* handle, baton_error* error, Body&& body) {
  return locked(handle, error, [&](KvConnector& connector, std::unique_lock<std::mutex>&) {
    const absl::Status status = body(connector);
    handle->changed_by_call = true;
    handle->wanted.ring();
    return status;
  });
}

std::chrono::steady_clock::time_point end_of(int64_t timeout) {
  const auto now = std::chrono::steady_clock::now();
  const auto longest = std::chrono::hours(24 * 365);
  return now + std::min<std::chrono::nanoseconds>(
                   longest, std::chrono::nanoseconds(timeout < 0 ? INT64_MAX : timeout));
}

// Why a load will never be complete: BATON_ERR_TIMEOUT would be of the call.
int32_t failure(const absl::Status& why, baton_error* error) {
  return result_of(absl::IsDeadlineExceeded(why) ? absl::CancelledError(why.message()) : why,
                   error);
}

absl::StatusOr<BatonConnectorOptions> options_of(const baton_kv_connector_options& from) {
  BatonConnectorOptions out;
  absl::StatusOr<baton::WorkerOptions> worker =
      worker_options({from.providers, from.require, from.key_file, from.listen_host,
                      from.listen_port, from.max_transfers, from.settings, from.advertise});
  if (!worker.ok()) return worker.status();
  out.worker = *std::move(worker);
  out.worker.name = view(from.name);
  if (out.worker.name.empty() || out.worker.name.size() > baton::kMaxWorkerName) {
    return absl::InvalidArgumentError("name: a connector's name must have 1 to 64 bytes");
  }
  if (from.serialized != 0) out.mode = baton::kvtransfer::KvSendMode::kSerialized;
  out.allow_pull = from.allow_pull != 0;
  set_time(from.max_lease, out.max_lease);
  return out;
}

absl::StatusOr<KvLoad> load_of(const baton_kv_load& from) {
  for (const auto& [name, time] :
       {std::pair("timeout", from.timeout), {"silence", from.silence}, {"lease", from.lease}}) {
    if (time >= -1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", time, ": nanoseconds, 0 for the default, or -1 for ever"));
  }
  KvLoad load;
  load.id = from.id;
  load.prefill = view(from.prefill);
  for (size_t i = 0; i < from.shard_count; ++i) load.shards.emplace_back(view(from.shards[i]));
  if (load.prefill.empty() && load.shards.empty()) {
    return absl::InvalidArgumentError(
        "no source for the KV: set `prefill` to the address of a connector, or `shards` to "
        "several");
  }
  load.key = view(from.key);
  load.loads_of_key = from.loads_of_key;
  load.tokens.assign(from.tokens, from.tokens + from.token_count);
  load.first_token = from.first_token;
  load.blocks.assign(from.blocks, from.blocks + from.block_count);
  set_time(from.timeout, load.timeout);
  set_time(from.silence, load.silence);
  set_time(from.lease, load.lease);
  load.pull = from.pull != 0;
  return load;
}

}  // namespace

extern "C" {

void baton_kv_connector_options_init(baton_kv_connector_options* options, size_t size) {
  init_sized(baton_kv_connector_options{}, options, size);
}

int32_t baton_kv_connector_create(const baton_kv_connector_options* options,
                                  baton_kv_connector** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_kv_connector_options known{};
  if (!read_sized(options, known)) {
    return invalid("options: fill them in with baton_kv_connector_options_init()", error);
  }
  return caught(error, [&] {
    const Making making;
    const absl::StatusOr<BatonConnectorOptions> wanted = options_of(known);
    if (!wanted.ok()) return result_of(wanted.status(), error, About::kMaking);
    auto made = baton::kvtransfer::make_baton_connector(*wanted);
    if (!made.ok()) return result_of(made.status(), error, About::kMaking);
    auto handle = std::make_unique<baton_kv_connector>();
    handle->connector = *std::move(made);
    for (const baton::base::EventFd* each : {&handle->event, &handle->wanted}) {
      if (!each->status().ok()) return result_of(each->status(), error);
    }
    if (handle->connector->event_fd() < 0) {
      return result_of(baton::base::refused("eventfd", errno), error);
    }
    try {
      handle->thread = std::thread(keep_going, std::ref(*handle));
    } catch (const std::system_error&) {
      return result_of(
          absl::ResourceExhaustedError("no thread for the connector: raise `ulimit -u`"), error);
    }
    *out = handle.release();
    return result_of(absl::OkStatus(), error);
  });
}

void baton_kv_connector_destroy(baton_kv_connector* connector) {
  if (!is_usable(connector)) return;
  {
    const std::lock_guard lock(connector->mutex);
    connector->stop = true;
  }
  connector->wanted.ring();
  connector->thread.join();
  delete connector;
}

int32_t baton_kv_connector_register_cache(baton_kv_connector* connector,
                                          const baton_kv_layout* layout, baton_error* error) {
  if (layout == nullptr) return invalid("layout is NULL: pass what describes the cache", error);
  return asked(connector, error, [&](KvConnector& to) {
    if (absl::Status good = layout->cache.check(); !good.ok()) return good;
    std::vector<void*> buffers;
    for (const uint64_t address : layout->cache.addresses) {
      buffers.push_back(reinterpret_cast<void*>(address));
    }
    absl::Status status = to.register_cache(layout->cache.layout, buffers);
    if (status.ok()) connector->layers = layout->cache.layout.layers();
    return status;
  });
}

int32_t baton_kv_connector_address(baton_kv_connector* connector, baton_bytes* out,
                                   baton_error* error) {
  give_nothing(out);
  return locked(connector, error, [&](KvConnector& of, auto&) { return give(of.address(), out); });
}

int baton_kv_connector_event_fd(const baton_kv_connector* connector) {
  return is_usable(connector) ? connector->event.fd() : -1;
}

int32_t baton_kv_connector_wait(baton_kv_connector* connector, int64_t timeout,
                                baton_error* error) {
  return locked(connector, error, [&](KvConnector&, std::unique_lock<std::mutex>& lock) {
    const bool looked = connector->changed.wait_until(
        lock, end_of(timeout), [&] { return connector->looks != connector->waited; });
    if (!looked) return result_of(absl::DeadlineExceededError("nothing has happened"), error);
    connector->waited = connector->looks;
    return result_of(absl::OkStatus(), error);
  });
}

int32_t baton_kv_connector_get_stats(baton_kv_connector* connector, baton_kv_connector_stats* out,
                                     baton_bytes* route, baton_error* error) {
  give_nothing(route);
  return locked(connector, error, [&](KvConnector& of, auto&) {
    const baton::kvtransfer::KvConnectorStats now = of.stats();
    baton_kv_connector_stats all{};
    all.bytes_sent = now.bytes_sent;
    all.bytes_loaded = now.bytes_loaded;
    all.loads_failed = now.loads_failed;
    all.jobs_failed = now.jobs_failed;
    if (!write_sized(all, out)) {
      return invalid("out: set its size to sizeof(baton_kv_connector_stats)", error);
    }
    return result_of(give(now.route, route), error);
  });
}

int32_t baton_kv_load_start(baton_kv_connector* connector, const baton_kv_load* load,
                            baton_error* error) {
  baton_kv_load known = BATON_KV_LOAD_INIT;
  if (!read_sized(load, known)) return invalid("load: fill it in with BATON_KV_LOAD_INIT", error);
  if (is_missing(known.tokens, known.token_count) || is_missing(known.blocks, known.block_count) ||
      is_missing(known.shards, known.shard_count)) {
    return missing(error);
  }
  return asked(connector, error, [&](KvConnector& from) {
    absl::StatusOr<KvLoad> wanted = load_of(known);
    if (!wanted.ok()) return wanted.status();
    absl::Status started = from.start_load(*std::move(wanted));
    if (started.ok()) connector->loads.insert(known.id);
    return started;
  });
}

int32_t baton_kv_load_state(baton_kv_connector* connector, uint64_t id, uint32_t* layers,
                            baton_error* error) {
  give_nothing(layers);
  return locked(connector, error, [&](KvConnector& of, auto&) {
    const uint32_t here = of.layers_loaded(id);
    if (layers != nullptr) *layers = here;
    const absl::Status status = of.load_status(id);
    if (!status.ok()) return failure(status, error);
    result_of(status, error);
    return here < connector->layers ? int32_t{BATON_IN_PROGRESS} : int32_t{BATON_OK};
  });
}

int32_t baton_kv_load_wait(baton_kv_connector* connector, uint64_t id, uint32_t layer,
                           int64_t timeout, baton_error* error) {
  return locked(connector, error, [&](KvConnector& of, std::unique_lock<std::mutex>& lock) {
    if (layer >= connector->layers) {
      return result_of(absl::InvalidArgumentError("the cache has no such layer"), error);
    }
    absl::Status status;
    const auto over = [&] {
      status = of.load_status(id);
      return !status.ok() || of.layers_loaded(id) > layer;
    };
    if (connector->changed.wait_until(lock, end_of(timeout), over)) return failure(status, error);
    return result_of(
        absl::DeadlineExceededError("the layer has not arrived yet: the load continues"), error);
  });
}

int32_t baton_kv_load_renew(baton_kv_connector* connector, uint64_t id, int64_t timeout,
                            baton_error* error) {
  return asked(connector, error,
               [&](KvConnector& of) { return of.renew_load(id, timeout_of(timeout)); });
}

int32_t baton_kv_load_payload(baton_kv_connector* connector, uint64_t id, baton_bytes* out,
                              baton_error* error) {
  give_nothing(out);
  return locked(connector, error, [&](KvConnector& of, auto&) {
    const absl::Status status = of.load_status(id);
    if (!status.ok()) return failure(status, error);
    const absl::StatusOr<std::string> payload = of.load_payload(id);
    if (absl::IsUnavailable(payload.status())) {
      result_of(absl::OkStatus(), error);
      return int32_t{BATON_IN_PROGRESS};
    }
    return payload.ok() ? result_of(give(*payload, out), error) : failure(payload.status(), error);
  });
}

int32_t baton_kv_load_failed_blocks(baton_kv_connector* connector, uint64_t id, uint32_t* out,
                                    size_t room, size_t* count, baton_error* error) {
  give_nothing(count);
  if (is_missing(out, room) || count == nullptr) return missing(error);
  return locked(connector, error, [&](KvConnector& of, auto&) {
    if (connector->loads.count(id) == 0) {
      return absl::NotFoundError(absl::StrCat("there is no load ", id));
    }
    give_list(of.failed_blocks(id), out, room, count);
    return absl::OkStatus();
  });
}

int32_t baton_kv_load_end(baton_kv_connector* connector, uint64_t id, baton_error* error) {
  return locked(connector, error, [&](KvConnector& of, auto&) {
    const absl::Status before = of.load_status(id);
    const bool over = of.end_load(id);
    if (over) connector->loads.erase(id);
    // Asked again, it changes nothing: that wakes no waiter, least of all one that sleeps until it
    // is over.
    if (of.load_status(id) != before) connector->changed_by_call = true;
    connector->wanted.ring();
    result_of(absl::OkStatus(), error);
    return over ? int32_t{BATON_OK} : int32_t{BATON_IN_PROGRESS};
  });
}

int32_t baton_kv_job_next(baton_kv_connector* connector, baton_kv_job* out, baton_error* error) {
  if (out == nullptr || out->size < sizeof out->size) {
    return invalid("out: set its size to sizeof(baton_kv_job)", error);
  }
  return locked(connector, error, [&](KvConnector& of, auto&) {
    std::optional<KvJob> next = of.next_job();
    if (!next) return absl::NotFoundError("no request is waiting");
    const KvJob& job = connector->job = *std::move(next);
    baton_kv_job all{};
    all.job = job.job;
    all.request = job.request;
    all.decode = job.decode.c_str();
    all.key = job.key.c_str();
    all.tokens = job.tokens.data();
    all.token_count = job.tokens.size();
    all.first_token = job.first_token;
    all.loads_of_key = job.loads_of_key;
    write_sized(all, out);
    return absl::OkStatus();
  });
}

int32_t baton_kv_job_bind(baton_kv_connector* connector, const baton_kv_binding* binding,
                          uint64_t* job, baton_error* error) {
  give_nothing(job);
  baton_kv_binding known{};
  if (!read_sized(binding, known)) {
    return invalid("binding: set its size to sizeof(baton_kv_binding)", error);
  }
  if (job == nullptr) return invalid("job is NULL: pass the address for the number", error);
  return asked(connector, error, [&](KvConnector& to) {
    KvBinding bound;
    bound.key = view(known.key);
    bound.tokens = known.tokens;
    bound.loads = known.loads;
    set_time(known.lease, bound.lease);
    const absl::StatusOr<uint64_t> made = to.bind(bound);
    if (made.ok()) *job = *made;
    return made.status();
  });
}

int32_t baton_kv_job_renew(baton_kv_connector* connector, uint64_t job, int64_t lease,
                           baton_error* error) {
  return asked(connector, error,
               [&](KvConnector& of) { return of.renew_job(job, timeout_of(lease)); });
}

int baton_kv_job_is_wanted(baton_kv_connector* connector, uint64_t job) {
  bool wanted = false;
  locked(connector, nullptr, [&](KvConnector& of, auto&) { wanted = of.is_wanted(job); });
  return wanted ? 1 : 0;
}

int32_t baton_kv_job_save_layer(baton_kv_connector* connector, uint64_t job, uint32_t layer,
                                uint32_t first_block, const uint32_t* blocks, size_t count,
                                baton_error* error) {
  if (is_missing(blocks, count)) return missing(error);
  return asked(connector, error, [&](KvConnector& of) {
    return of.save_layer(job, layer, first_block, {blocks, count});
  });
}

int32_t baton_kv_job_give_payload(baton_kv_connector* connector, uint64_t job, const void* payload,
                                  size_t size, baton_error* error) {
  if (is_missing(payload, size)) return missing(error);
  return asked(connector, error, [&](KvConnector& of) {
    return of.give_payload(job, std::string(view(payload, size)));
  });
}

int32_t baton_kv_job_finish(baton_kv_connector* connector, uint64_t job, int32_t outcome,
                            const char* why, baton_error* error) {
  if (outcome > BATON_OK)
    return invalid("outcome must be BATON_OK or the number of an error", error);
  return asked(connector, error, [&](KvConnector& of) {
    of.finish_job(job, absl::Status(code_of(outcome), why == nullptr ? "" : why));
    return absl::OkStatus();
  });
}

int32_t baton_kv_job_state(baton_kv_connector* connector, uint64_t job, baton_error* error) {
  return locked(connector, error, [&](KvConnector& of, auto&) {
    const bool over = of.is_saved(job);
    result_of(absl::OkStatus(), error);
    return over ? int32_t{BATON_OK} : int32_t{BATON_IN_PROGRESS};
  });
}

}  // extern "C"
