// The C interface: sessions of KV that goes by the name of a transfer, over a C agent.
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "capi/agent_handle.h"
#include "kvtransfer/session/direct_mover.h"
#include "transport/base/threads/forks.h"

using baton::Time;
using namespace baton::capi;
using baton::kvtransfer::KvLoaded;
using baton::kvtransfer::KvOrder;
using baton::kvtransfer::KvSession;
using baton::kvtransfer::KvSessionOptions;

struct baton_kv_session : baton::Clock {
  Time now() const override { return Time(clock(context)); }

  const baton::base::MadeHere made_here;
  baton_clock clock = nullptr;
  void* context = nullptr;
  std::shared_ptr<KvSession> session;  // and its agent's
};

namespace {

template <typename Body>
int32_t in(baton_kv_session* session, baton_error* error, Body&& body) {
  return with_own(
      session, "session is NULL: pass what baton_kv_session_create() made",
      "the session belongs to the process that this one was forked from: make another one", error,
      [&] { return body(*session->session); });
}

}  // namespace

extern "C" {

int32_t baton_kv_session_create(baton_agent* agent, const char* cache, baton_clock clock,
                                void* context, baton_kv_session** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  return guarded(agent, error, [&] {
    const std::lock_guard lock(agent->mutex);
    if (agent->session != nullptr && agent->session->agent() != nullptr) {
      return absl::FailedPreconditionError("the agent has a session");
    }
    const Making making;
    auto made = std::make_unique<baton_kv_session>();
    made->clock = clock;
    made->context = context;
    KvSessionOptions options;
    options.agent = agent->agent.get();
    options.start_thread = clock == nullptr;
    if (clock != nullptr) options.clock = made.get();
    auto session = baton::kvtransfer::session::make_direct_session(view(cache), std::move(options));
    if (!session.ok()) return session.status();
    made->session = agent->session = *std::move(session);
    *out = made.release();
    return absl::OkStatus();
  });
}

void baton_kv_session_destroy(baton_kv_session* session) {
  if (session == nullptr || session->made_here.elsewhere()) return;
  session->session->close();
  delete session;
}

int baton_kv_session_turn(baton_kv_session* session) {
  bool busy = false;
  in(session, nullptr, [&](KvSession& its) { busy = its.turn(); });
  return busy ? 1 : 0;
}

int32_t baton_kv_session_open(baton_kv_session* session, const char* transfer, uint64_t* send,
                              baton_error* error) {
  if (!cleared(send)) return invalid("send is NULL: pass the address for the number", error);
  return in(session, error,
            [&](KvSession& its) { *send = its.open(std::string(view(transfer)), 0); });
}

int32_t baton_kv_session_save(baton_kv_session* session, uint64_t send, uint32_t layer,
                              uint64_t first_block, const uint32_t* blocks, size_t count,
                              baton_error* error) {
  if (is_missing(blocks, count)) return missing(error);
  return in(session, error, [&](KvSession& its) {
    return its.save(send, layer, first_block, {blocks, count});
  });
}

int32_t baton_kv_session_hold(baton_kv_session* session, uint64_t send, baton_error* error) {
  return in(session, error, [&](KvSession& its) { its.hold(send); });
}

int32_t baton_kv_session_drop(baton_kv_session* session, uint64_t send, baton_error* error) {
  return in(session, error, [&](KvSession& its) { its.drop(send); });
}

int32_t baton_kv_session_next_released(baton_kv_session* session, uint64_t* send,
                                       baton_error* error) {
  if (!cleared(send)) return invalid("send is NULL: pass the address for the number", error);
  return in(session, error, [&](KvSession& its) {
    const std::optional<uint64_t> one = its.next_released();
    *send = one.value_or(0);
    return one ? absl::OkStatus() : absl::NotFoundError("no request is released");
  });
}

int32_t baton_kv_session_load(baton_kv_session* session, const baton_kv_session_order* order,
                              baton_error* error) {
  baton_kv_session_order known = BATON_KV_SESSION_ORDER_INIT;
  if (!read_sized(order, known)) {
    return invalid("order: fill it in with BATON_KV_SESSION_ORDER_INIT", error);
  }
  if (known.id == 0) return invalid("order.id is 0, which says that no load is over", error);
  if (is_missing(known.runs, known.run_count)) return missing(error);
  return in(session, error, [&](KvSession& its) {
    KvOrder wanted{known.id,
                   {.transfer = std::string(view(known.transfer)),
                    .agent = std::string(view(known.agent)),
                    .address = std::string(view(known.address)),
                    .finished = known.finished != 0,
                    .ranks = known.ranks},
                   {},
                   timeout_of(known.timeout),
                   timeout_of(known.silence)};
    for (const baton_kv_run& run : absl::MakeConstSpan(known.runs, known.run_count)) {
      if (is_missing(run.blocks, run.count)) {
        return absl::InvalidArgumentError("a run has no blocks, but a count of them");
      }
      wanted.runs.push_back({run.first_block,
                             {run.blocks, run.blocks + run.count},
                             {run.first_token, run.end_token}});
    }
    return its.load(std::move(wanted));
  });
}

int32_t baton_kv_session_next_loaded(baton_kv_session* session, int64_t timeout,
                                     baton_kv_loaded* out, baton_error* error) {
  if (!write_sized(baton_kv_loaded{}, out)) {
    return invalid("out: set its size to sizeof(baton_kv_loaded)", error);
  }
  int32_t none = BATON_OK;
  const int32_t result = in(session, error, [&](KvSession& its) {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      its.progress();
      const std::optional<KvLoaded> loaded = its.next_loaded();
      if (loaded.has_value()) {
        write_sized({0, loaded->id, loaded->took.count(), loaded->reading.count()}, out);
        return loaded->status;
      }
      const Time left = timeout_of(timeout) - (std::chrono::steady_clock::now() - start);
      if (left <= Time::zero()) break;
      its.wait(std::min<Time>(left, std::chrono::seconds(1)), -1);
    }
    none = BATON_IN_PROGRESS;
    return absl::OkStatus();
  });
  return result == BATON_OK ? none : result;
}

}  // extern "C"
