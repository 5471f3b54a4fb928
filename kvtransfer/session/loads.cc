// The decode side of a session: the engine's orders, and each load from its start to its end.
#include "kvtransfer/session/loads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

constexpr Time kDeclineTimeout = std::chrono::seconds(10);

absl::Status closed() { return absl::UnavailableError("the hand-off is closed"); }

}  // namespace

// --- the engine's thread

absl::Status Loads::start(KvOrder order) {
  if (!is_text(order.from.transfer) || !is_text(order.from.agent)) {
    return absl::InvalidArgumentError("the names of a transfer and of an agent must be UTF-8");
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return closed();
  const uint64_t serial = next_serial_++;
  if (order.runs.empty()) {
    order.timeout = patient(kDeclineTimeout);
  } else {
    const auto [view, made] = views_.try_emplace(order.id);
    if (!made) {
      return absl::AlreadyExistsError(absl::StrCat("load ", order.id, " is already in progress"));
    }
    view->second.serial = serial;
    for (const KvRun& run : order.runs) {
      view->second.missing.insert(view->second.missing.end(), run.blocks.begin(), run.blocks.end());
    }
  }
  orders_.emplace_back(std::move(order), serial);
  core_.wake_thread();
  return absl::OkStatus();
}

std::optional<KvLoaded> Loads::next_loaded() {
  const std::lock_guard lock(mutex_);
  const auto it = std::find_if(views_.begin(), views_.end(),
                               [](const auto& entry) { return entry.second.over; });
  if (it == views_.end()) return std::nullopt;
  const View& view = it->second;
  KvLoaded out{it->first, view.status, view.took, view.reading};
  views_.erase(it);
  return out;
}

uint32_t Loads::layers_loaded(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? 0 : it->second.layers;
}

absl::Status Loads::status(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? absl::NotFoundError("there is no such load") : it->second.status;
}

bool Loads::is_exact(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it != views_.end() && it->second.exact;
}

bool Loads::end(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  if (it == views_.end()) return true;
  core_.wake_thread();
  const bool over = it->second.over || !it->second.asked;
  it->second.unwanted = true;
  if (over) views_.erase(it);
  return over;
}

absl::Status Loads::renew(KvRequestId id, Time timeout) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  if (it == views_.end()) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (timeout <= Time::zero()) {
    return absl::InvalidArgumentError("a load must be renewed for more than 0 s");
  }
  if (it->second.status.ok()) renewals_[id] = timeout;
  core_.wake_thread();
  return it->second.status;
}

absl::StatusOr<std::string> Loads::payload(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  if (it == views_.end()) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (!it->second.status.ok()) return it->second.status;
  if (it->second.payload.has_value()) return *it->second.payload;
  if (it->second.told) {
    return absl::FailedPreconditionError("prefill ended without delivering it: compute it here");
  }
  return absl::UnavailableError("prefill has not finished yet: ask again");
}

std::vector<uint32_t> Loads::failed_blocks(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? std::vector<uint32_t>() : it->second.missing;
}

uint64_t Loads::bytes_loaded() {
  const std::lock_guard lock(mutex_);
  return bytes_loaded_;
}
uint64_t Loads::failed() {
  const std::lock_guard lock(mutex_);
  return failed_;
}
std::string Loads::route() {
  const std::lock_guard lock(mutex_);
  return last_.empty() || core_.agent == nullptr ? "" : core_.agent->explain(last_);
}

// --- the session's thread

Loads::View* Loads::view_of(const Load& load) {
  const auto it = views_.find(load.order.id);
  return it == views_.end() || it->second.serial != load.serial ? nullptr : &it->second;
}

// The engine hears of it at once; its blocks are not free before nothing moves.
void Loads::fail(Load& load, const absl::Status& why) {
  if (why.ok() || !load.why.ok()) return;
  load.why = why;
  if (!load.wanted) return;
  const std::lock_guard lock(mutex_);
  View* const view = view_of(load);
  if (view == nullptr || view->over || (load.incoming != nullptr && load.incoming->complete()))
    return;
  view->status = why;
  if (load.incoming != nullptr) view->missing = load.incoming->missing();
  ++failed_;
  core_.wake_engine();
}

void Loads::stop() {
  if (core_.own != nullptr) return;
  for (const Load& load : loads_) {
    for (const KvMover::Posted& read : load.reads) core_.agent->abort(read.transfer).IgnoreError();
  }
  for (const Load& load : loads_) {
    for (const KvMover::Posted& read : load.reads) {
      core_.agent->release(read.transfer).IgnoreError();
    }
  }
}

void Loads::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  orders_.clear();
  by_key_.clear();
  loads_.clear();
  for (auto& [id, view] : views_) {
    if (view.over) continue;
    view.status = closed();
    view.over = true;
  }
}

// Where there are more of them than before.
void Loads::note_layers(Load& load, uint32_t before) {
  const uint32_t here = load.incoming->layers();
  if (here == before) return;
  const std::lock_guard lock(mutex_);
  for (uint32_t layer = before; layer < here; ++layer) {
    const uint64_t bytes = load.incoming->bytes(layer);
    bytes_loaded_ += bytes;
    if (core_.timeline == nullptr) continue;
    const Time now = core_.clock->now();
    core_.timeline->add(
        {"arrival", absl::StrCat("layer ", layer, " is here"), now, now, load.order.id, bytes});
  }
  View* const view = view_of(load);
  if (view == nullptr) return;
  view->layers = here;
  view->exact = load.incoming->exact();
  if (load.incoming->complete()) view->missing.clear();
  core_.wake_engine();
}

bool Loads::step() {
  std::deque<std::pair<KvOrder, uint64_t>> orders;
  std::map<KvRequestId, Time> renewals;
  {
    const std::lock_guard lock(mutex_);
    orders.swap(orders_);
    renewals.swap(renewals_);
  }
  ++steps_;
  const Time now = core_.clock->now();
  // Prefill is not silent while no thread listens: this thread had no processor, or was suspended.
  const Time deaf = now - stepped_.value_or(now) - kAsk;
  stepped_ = now;
  if (deaf > Time{}) {
    for (Load& load : loads_) {
      for (Asked& asked : load.sources) asked.heard += deaf;
    }
  }
  // Those that are over first: a new one may be of the same transfer.
  advance(loads_.begin(), now, renewals);
  const size_t known = loads_.size();
  for (auto& [order, serial] : orders) begin(std::move(order), serial, now);
  advance(std::next(loads_.begin(), static_cast<ptrdiff_t>(known)), now, renewals);
  std::erase_if(unsaid_, [this](const auto& done) { return say_done(done.first, done.second); });
  return !loads_.empty() || !unsaid_.empty();
}

void Loads::advance(std::list<Load>::iterator next, Time now,
                    const std::map<KvRequestId, Time>& renewals) {
  while (next != loads_.end()) {
    const auto at = next++;
    Load& load = *at;
    const auto renewed = renewals.find(load.order.id);
    if (renewed != renewals.end() && load.wanted && !load.reported) {
      load.order.timeout =
          renewed->second < kNever - now ? now - load.started + renewed->second : kNever;
      for (Asked& asked : load.sources) asked.looked = now - kAsk;  // prefill hears of it
    }
    move(load, now);
    if (!end_if_over(load, now)) continue;
    for (const Asked& asked : load.sources) {
      const auto key = by_key_.find({asked.agent, load.order.from.transfer});
      if (key != by_key_.end() && key->second == &load) by_key_.erase(key);
    }
    loads_.erase(at);
  }
}

void Loads::begin(KvOrder order, uint64_t serial, Time now) {
  Load& load = loads_.emplace_back();
  load.serial = serial;
  load.started = now;
  load.wanted = !order.runs.empty();
  load.never = serial == 0;
  load.hears = load.wanted && (order.push || !order.tokens.empty() || order.loads > 0);
  load.order = std::move(order);
  if (const absl::Status good = set_up(load); !good.ok()) {
    fail(load, good);
    if (load.wanted) report(load, good);
    return loads_.pop_back();
  }
  for (const Asked& asked : load.sources) {
    if (!asked.agent.empty()) by_key_[{asked.agent, load.order.from.transfer}] = &load;
  }
}

absl::Status Loads::set_up(Load& load) {
  if (const absl::Status good = add_sources(load); !good.ok()) return good;
  for (Asked& asked : load.sources) {
    asked.heard = load.started;
    asked.looked = load.started - kAsk;
    if (asked.agent == core_.agent->name()) {
      return absl::InvalidArgumentError("a worker cannot load from itself");
    }
    if (by_key_.contains({asked.agent, load.order.from.transfer})) {
      // Which is wanted, where this one is declined.
      return absl::AlreadyExistsError(absl::StrCat(
          "another request loads transfer \"", load.order.from.transfer, "\" of ", asked.agent));
    }
  }
  if (!load.wanted) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<KvMover::Incoming>> incoming =
      core_.mover->begin(load.order.runs, load.sources.size(), load.order.id);
  if (!incoming.ok()) return incoming.status();
  load.incoming = *std::move(incoming);
  for (size_t i = 0; i < load.sources.size(); ++i) {
    if (load.sources[i].share) load.incoming->take_share(i, *load.sources[i].share);
  }
  return absl::OkStatus();
}

// The prefill workers that the load asks.
absl::Status Loads::add_sources(Load& load) {
  const KvTransfer& from = load.order.from;
  const KvWorker& me = core_.shard;
  if (from.ranks == 0 || from.ranks > kMostRanks) {
    return absl::InvalidArgumentError(absl::StrCat("a prefill cannot have ", from.ranks, " ranks"));
  }
  if (load.order.loads > 0) {
    const auto ranks = static_cast<uint32_t>(from.workers.size());
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const KvTransfer::At& at = from.workers[rank];
      if (at.address.empty()) continue;  // it has nothing of ours
      Asked& asked = load.sources.emplace_back();
      asked.agent = at.agent;
      asked.address = at.address;
      asked.share = KvShare{ranks, rank, turn_of(core_.agent->name())};
    }
    return absl::OkStatus();
  }
  const auto ranks = from.workers.empty() ? from.ranks : static_cast<uint32_t>(from.workers.size());
  const std::vector<std::string> addresses = absl::StrSplit(from.address, ',');
  for (const uint32_t rank : ranks_heard(me.heads, ranks, me.ranks, me.rank)) {
    const uint32_t number = rank + me.stage * ranks;
    Asked& asked = load.sources.emplace_back();
    if (number < from.workers.size()) {
      asked.agent = from.workers[number].agent;
      asked.address = from.workers[number].address;
      continue;
    }
    asked.agent = absl::StrCat(from.agent, "/", number);
    asked.address = from.address;
    if (number < addresses.size()) {
      asked.address = addresses[number];
    } else if (number > 0) {
      const size_t colon = from.address.rfind(':') + 1;  // 0: there is none
      uint32_t port = 0;
      if (!absl::SimpleAtoi(absl::string_view(from.address).substr(colon), &port)) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill's address is \"", from.address, "\", and not HOST:PORT"));
      }
      asked.address = absl::StrCat(from.address.substr(0, colon), port + number);
    }
  }
  return absl::OkStatus();
}

void Loads::move(Load& load, Time now) {
  if (load.reported) return;
  if (load.wanted && load.why.ok()) {
    bool unwanted = false;
    {
      const std::lock_guard lock(mutex_);
      const View* const view = view_of(load);
      unwanted = view == nullptr || view->unwanted;
    }
    // Where all is here, prefill's last word is on its way.
    if (unwanted && !load.incoming->complete()) {
      fail(load, absl::CancelledError("the load was ended before its KV was here"));
    }
  }
  if (load.why.ok() && now - load.started >= load.order.timeout &&
      !(load.hears && load.incoming->complete())) {
    fail(load, absl::DeadlineExceededError(
                   absl::StrCat("not complete after ", seconds(load.order.timeout),
                                " s; ask another worker, compute it here, or allow more time")));
  }
  for (size_t i = 0; i < load.sources.size() && load.why.ok(); ++i) fail(load, move(load, i, now));
  if (load.reads.empty()) load.reading_since = now;
  if (load.why.ok() && load.incoming != nullptr) fail(load, load.incoming->read(&load.reads));
  follow_reads(load, now);
}

absl::Status Loads::move(Load& load, size_t number, Time now) {
  Asked& asked = load.sources[number];
  if (asked.agent.empty() && !find_name(load, asked)) {
    if (!load.why.ok()) return load.why;
    const absl::Status status = core_.agent->ask_metadata("", asked.address);
    asked.called = true;
    return status.ok() ? status : not_reached(asked, status);
  }
  const auto met = peers_.find(asked.agent);
  const Time heard = met == peers_.end() ? asked.heard : std::max(asked.heard, met->second->heard);
  const Time silence = load.order.silence;
  const bool known_silent =
      met != peers_.end() && met->second->silent && is_there(asked.agent, *met->second);
  if (silence > Time{} && !asked.told && (known_silent || now - heard >= silence)) {
    if (met != peers_.end()) met->second->silent = is_there(asked.agent, *met->second);
    return absl::UnavailableError(
        absl::StrCat("prefill ", asked.agent, " is silent for ", seconds(silence),
                     " s, no sign of life; ask another worker, compute it here, or allow more "
                     "silence"));
  }
  // Three times in a lease.
  const Time often = load.order.lease > Time{} ? std::min<Time>(kAsk, load.order.lease / 4) : kAsk;
  const bool doubts = load.incoming != nullptr && asked.answered && asked.source != nullptr &&
                      load.incoming->doubts(number);
  if (now - asked.looked >= std::min(often, asked.often) || doubts) {
    if (absl::Status status = look(load, asked, now); !status.ok()) return status;
  }
  const auto known = peers_.find(asked.agent);
  const std::shared_ptr<Peer> peer = known == peers_.end() ? nullptr : known->second;
  if (peer != nullptr && peer->said.has_value()) learn(asked, *peer, now);
  if (peer != nullptr && !peer->refused.empty()) {
    return absl::FailedPreconditionError(peer->refused);
  }
  if (asked.source != nullptr && (peer == nullptr || asked.source != peer->source)) {
    return absl::UnavailableError(absl::StrCat("prefill ", asked.agent, " is gone"));
  }
  if (load.incoming == nullptr || peer == nullptr || peer->source == nullptr ||
      peer->said.has_value()) {
    return absl::OkStatus();
  }
  const KvTransfer& from = load.order.from;
  const size_t ranks = from.workers.empty() ? from.ranks : from.workers.size();
  if (load.order.loads == 0 && peer->source->ranks != ranks) {
    return absl::FailedPreconditionError(absl::StrCat("prefill has ", peer->source->ranks,
                                                      " ranks, but was expected to have ", ranks,
                                                      ": pass tp_size in kv_transfer_params"));
  }
  if (asked.source == nullptr) {
    load.incoming->join(number, asked.source = peer->source);
    if (!load.order.tokens.empty() && !load.incoming->exact()) {
      return absl::FailedPreconditionError(
          absl::StrCat("prefill ", asked.agent, " computes with another checkpoint or arithmetic"));
    }
  }
  if (asked.ahead.empty()) asked.unknown_bytes = 0;
  for (const json& said : std::exchange(asked.unknown, {})) {
    if (absl::Status status = take(load, number, said); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Loads::take(Load& load, size_t number, const json& said) {
  try {
    const json& parts = said.at("parts");
    if (said.at("kind") == "ready") return load.incoming->ready(number, parts);
    if (!load.order.push) return absl::InvalidArgumentError("prefill wrote what was to be read");
    const uint32_t before = load.incoming->layers();
    absl::Status good = load.incoming->wrote(number, parts);
    note_layers(load, before);
    return good;
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot parse prefill's message: ", error.what()));
  }
}

void Loads::follow_reads(Load& load, Time now) {
  if (load.reads.empty()) return;
  std::erase_if(load.reads, [&](const KvMover::Posted& read) {
    if (!load.why.ok()) core_.agent->abort(read.transfer).IgnoreError();
    const absl::StatusOr<AgentTransferState> state = core_.agent->state(read.transfer);
    if (state.ok() && *state == AgentTransferState::kRunning) return false;
    const bool done = state.ok() && *state == AgentTransferState::kDone;
    if (!done) fail(load, state.ok() ? core_.agent->status(read.transfer) : state.status());
    core_.agent->release(read.transfer).IgnoreError();
    Asked& asked = load.sources[read.from];
    if (load.why.ok()) asked.heard = now;
    const uint32_t before = load.incoming->layers();
    fail(load, load.incoming->landed(read.transfer, load.why.ok()));
    load.incoming->held(read.from, asked.confirmed, core_.clock->now());
    note_layers(load, before);
    return true;
  });
  if (load.reads.empty()) load.reading += core_.clock->now() - load.reading_since;
}

// Whether it can be forgotten.
bool Loads::end_if_over(Load& load, Time now) {
  const bool complete =
      load.incoming != nullptr
          ? load.incoming->complete()
          : std::all_of(load.sources.begin(), load.sources.end(),
                        [](const Asked& asked) { return asked.asked.has_value(); });
  const auto all = [&load](auto what) {
    return std::all_of(load.sources.begin(), load.sources.end(), what);
  };
  // Writes' messages may come behind it.
  const bool told = all([](const Asked& asked) {
    return asked.told && asked.unknown.empty() && asked.wrote >= asked.writes;
  });
  if (load.why.ok() && load.order.push && !complete && told) {
    fail(load,
         absl::DataLossError("prefill reports that all KV is sent, but some has not arrived"));
  }
  if (!load.reads.empty() || (load.why.ok() && !complete)) return false;
  if (!load.hears) {
    json done = {
        {"kind", "done"}, {"transfer", load.order.from.transfer}, {"ranks", core_.shard.ranks}};
    if (load.never) done.update({{"loads", load.order.loads}, {"never", true}});
    for (const Asked& asked : load.sources) {
      unsaid_.emplace_back(Key{asked.agent, load.order.from.transfer}, done);
    }
    if (load.wanted) report(load, load.why);
    return true;
  }
  let_go(load, now);
  const bool quiet = !load.order.push || all([](const Asked& asked) { return asked.told; });
  if (quiet && !std::exchange(load.reported, true)) report(load, load.why);
  if (!load.reported || !all([](const Asked& asked) { return asked.said_done; })) return false;
  {
    const std::lock_guard lock(mutex_);
    if (view_of(load) != nullptr && load.why.ok() &&
        !all([](const Asked& asked) { return asked.told; })) {
      return false;
    }
  }
  decline(load, now);
  return true;
}

void Loads::report(const Load& load, const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  View* const view = view_of(load);
  if (view == nullptr) return;
  view->took = core_.clock->now() - load.started;
  view->reading = load.reading;
  if (load.incoming == nullptr || !load.incoming->complete()) view->status = status;
  view->told = !load.sources.empty() && load.sources.front().told;
  view->over = true;
  if (load.incoming != nullptr) view->missing = load.incoming->missing();
  core_.wake_engine();
}

}  // namespace baton::kvtransfer::session
