// The KvConnector over a session and an agent of its own: what engines say of jobs and loads is
// said to the session, whose names here are a load's key, or one of its own.
#include <algorithm>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/baton_connector.h"
#include "kvtransfer/kv_session.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/direct_mover.h"
#include "transport/address.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/threads/forks.h"
#include "transport/net/endpoint.h"

namespace baton::kvtransfer {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kNotSaved = UINT32_MAX;
constexpr size_t kMaxJobs = 4096, kMaxKey = 256, kMaxRanks = 1024;
constexpr size_t kNonce = 8;  // characters behind the name that agents have
constexpr Time kMaxTimeout = std::chrono::hours(24);

std::string nonce() {
  std::random_device device;
  return absl::StrCat(absl::Hex(device(), absl::kZeroPad8));
}

// Agents that meet need different names: a connector's is followed by what no other one has.
// And the handshake tells a name in plain characters.
std::string agent_name(std::string name) {
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '.') c = '_';
  }
  return absl::StrCat(name.substr(0, kMaxAgentName - kNonce - 1), "~", nonce());
}

absl::Status invalid(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("KV load: ", what));
}

// The tokens of [first_token, length) that a group keeps.
KvTokens kept_tokens(const KvGroup& group, uint64_t first_token, uint64_t length) {
  const uint64_t window = group.window == 0 ? length : group.window;
  return {std::max(first_token, length > window ? length - window : 0), length};
}

class BatonConnector final : public KvConnector {
 public:
  BatonConnector(std::unique_ptr<Agent> agent, const BatonConnectorOptions& options, bool threads)
      : options_(options),
        threads_(threads),
        agent_(agent.get()),
        own_(std::move(agent)),
        nonce_(nonce()) {}

  absl::Status start() {
    KvSessionOptions session;
    session.own_agent = std::move(own_);
    session.max_lease = options_.max_lease;
    session.may_be_read = options_.allow_pull;
    session.worker.timeline = options_.worker.timeline;
    session.clock = options_.worker.clock;
    session.start_thread = threads_;
    absl::StatusOr<std::unique_ptr<KvSession>> made = KvSession::create(std::move(session));
    if (!made.ok()) return made.status();
    session_ = *std::move(made);
    return absl::OkStatus();
  }

  ~BatonConnector() override {
    if (made_here_.elsewhere()) {  // the parent's, whose threads are not here
      (void)session_.release();
      return;
    }
    session_ = nullptr;  // before the memory goes
  }

  absl::Status register_cache(const KvLayout& layout, absl::Span<void* const> buffers) override {
    if (absl::Status status = check_new_cache(layout); !status.ok()) return status;
    if (buffers.size() != layout.buffers.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          buffers.size(), " addresses for the ", layout.buffers.size(), " buffers of the layout"));
    }
    KvPlacement cache{layout, {}};
    std::vector<std::pair<Descriptor, MemoryKind>> registered;
    absl::Status status;
    for (size_t i = 0; i < buffers.size() && status.ok(); ++i) {
      const KvBuffer& buffer = layout.buffers[i];
      const auto kind = buffer.device == KvDevice::kCuda ? MemoryKind::kVram : MemoryKind::kDram;
      const Descriptor range{reinterpret_cast<uint64_t>(buffers[i]), buffer.bytes,
                             buffer.device_index};
      cache.addresses.push_back(range.address);
      status = agent_->register_memory(absl::MakeConstSpan(&range, 1), kind);
      if (status.ok()) registered.emplace_back(range, kind);
    }
    if (status.ok()) status = use(std::move(cache));
    for (size_t i = 0; i < registered.size() && !status.ok(); ++i) {
      agent_->deregister_memory(absl::MakeConstSpan(&registered[i].first, 1), registered[i].second)
          .IgnoreError();
    }
    return status;
  }

  absl::StatusOr<void*> allocate_cache(const KvLayout& layout) override {
    if (absl::Status status = check_new_cache(layout); !status.ok()) return status;
    KvPlacement cache{layout, {}};
    uint64_t bytes = 0;
    for (const KvBuffer& buffer : layout.buffers) {
      if (buffer.device != KvDevice::kHost) {
        return absl::UnimplementedError(
            "a connector allocates host memory only: allocate device memory yourself and register "
            "it");
      }
      cache.addresses.push_back(bytes);
      bytes += (buffer.bytes + kPage - 1) / kPage * kPage;
    }
    absl::StatusOr<base::CacheMemory> memory = base::CacheMemory::make(
        {.bytes = std::max(bytes, kPage), .huge_pages = options_.huge_pages});
    if (!memory.ok()) return memory.status();
    const auto base = reinterpret_cast<uint64_t>(memory->data());
    for (uint64_t& address : cache.addresses) address += base;
    const Descriptor range{base, memory->size(), 0};
    absl::Status status = memory->file() >= 0
                              ? agent_->register_mapped(range, memory->file())
                              : agent_->register_memory(absl::MakeConstSpan(&range, 1));
    if (status.ok()) status = use(std::move(cache));
    if (!status.ok()) return status;
    memory_ = *std::move(memory);
    return memory_.data();
  }

  std::string address() const override { return agent_->address(); }
  KvConnectorStats stats() const override { return session_->session_stats(); }
  WorkerStats worker_stats() const { return session_->stats(); }
  int event_fd() const override { return session_->event_fd(); }

  void progress() override {
    if (!threads_) session_->turn();
    session_->progress();
    take_released();
  }
  void wait(Time timeout, int fd) override {
    if (!threads_) session_->turn();
    session_->wait(timeout, fd);
    progress();
  }

  // --- decode
  absl::Status start_load(KvLoad load) override;
  uint32_t layers_loaded(KvRequestId id) override { return session_->layers_loaded(id); }
  absl::Status load_status(KvRequestId id) override {
    const absl::Status why = session_->load_status(id);
    const auto it = loads_.find(id);
    if (it == loads_.end()) return absl::NotFoundError(absl::StrCat("there is no load ", id));
    if (why.ok()) return why;
    return absl::Status(
        why.code(),
        absl::StrCat("the KV of request ", id, " will not come from ", it->second.from, " (",
                     session_->layers_loaded(id), " of ", layout_.layers(),
                     " layers are here): ", why.message(),
                     absl::IsUnavailable(why) ? "; ask another worker or compute it here" : ""));
  }
  absl::Status wait_for_layer(KvRequestId id, uint32_t layer) override {
    if (layer >= layout_.layers()) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " of ", layout_.layers()));
    }
    while (layers_loaded(id) <= layer) {
      if (absl::Status status = load_status(id); !status.ok()) return status;
      wait(std::chrono::milliseconds(100), -1);
    }
    return absl::OkStatus();
  }
  bool end_load(KvRequestId id) override {
    const auto it = loads_.find(id);
    if (it == loads_.end()) return true;
    bool over = session_->end_load(id);
    if (!over && !threads_) {
      session_->turn();
      over = session_->end_load(id);
    }
    if (!over) return false;
    unclaim(it->second, SIZE_MAX);
    loads_.erase(it);
    return true;
  }
  absl::Status renew_load(KvRequestId id, Time timeout) override {
    return session_->renew_load(id, std::min(timeout, kMaxTimeout));
  }
  absl::StatusOr<std::string> load_payload(KvRequestId id) override {
    return session_->payload(id);
  }
  std::vector<uint32_t> failed_blocks(KvRequestId id) override {
    return session_->failed_blocks(id);
  }

  // --- prefill
  std::optional<KvJob> next_job() override;
  absl::StatusOr<uint64_t> bind(const KvBinding& binding) override;
  absl::Status renew_job(uint64_t job, Time lease) override {
    if (!jobs_.contains(job)) return no_job(job);
    session_->expect(job, 0, std::clamp(lease, Time(0), kMaxTimeout));
    return absl::OkStatus();
  }
  absl::Status give_payload(uint64_t job, const std::string& payload) override {
    const auto it = jobs_.find(job);
    if (it == jobs_.end()) return no_job(job);
    if (it->second.finished) return is_finished(job);
    if (payload.size() > kMaxPayload) {
      return absl::InvalidArgumentError(
          absl::StrCat("a payload of ", payload.size(), " bytes; at most ", kMaxPayload));
    }
    session_->give(job, payload);
    return absl::OkStatus();
  }
  bool is_wanted(uint64_t job) override { return jobs_.contains(job) && session_->is_wanted(job); }
  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks) override;
  void finish_job(uint64_t job, const absl::Status& outcome) override;
  bool is_saved(uint64_t job) override {
    const auto it = jobs_.find(job);
    if (it == jobs_.end()) return true;
    if (!it->second.finished) return false;
    take_released();
    if (!it->second.released) return false;
    by_key_.erase(it->second.key);
    jobs_.erase(it);
    return true;
  }

 private:
  struct Load {
    std::vector<uint32_t> blocks;
    std::vector<size_t> group_ends;
    std::string from;  // for people
  };
  struct Job {
    std::string key;
    size_t tokens = 0;
    std::vector<std::vector<uint32_t>> pages;  // our blocks, by layer and block
    std::vector<size_t> first;                 // of each layer: the first of these that is saved
    bool finished = false;
    bool released = false;
  };

  void take_released() {
    for (const uint64_t send : session_->released()) {
      const auto it = jobs_.find(send);
      if (it != jobs_.end()) it->second.released = true;
    }
  }
  absl::Status check_new_cache(const KvLayout& layout) const {
    if (absl::Status good = agent_->usable(); !good.ok()) return good;
    if (!layout_.groups.empty()) {
      return absl::FailedPreconditionError("this worker has a KV cache already");
    }
    return layout.check();
  }
  absl::Status use(KvPlacement cache) {
    if (absl::Status good = cache.check(); !good.ok()) return good;
    for (size_t g = 0; g < cache.layout.groups.size(); ++g) {
      for (const uint32_t layer : cache.layout.groups[g].layers) places_.emplace_back(layer, g);
    }
    std::sort(places_.begin(), places_.end());
    layout_ = cache.layout;
    return session_->use(session::make_direct_mover(*agent_, cache));
  }
  absl::Status no_cache(absl::string_view what) const {
    if (absl::Status good = agent_->usable(); !good.ok()) return good;
    if (!layout_.groups.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "the connector has no cache yet: register_cache() comes before the first ", what));
  }
  static absl::Status no_job(uint64_t job) {
    return absl::NotFoundError(absl::StrCat("there is no job ", job));
  }
  static absl::Status is_finished(uint64_t job) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job, " is finished already"));
  }
  const KvGroup& group_of(uint32_t layer) const { return layout_.groups[places_[layer].second]; }
  uint64_t open(const std::string& key, const std::string& transfer, size_t tokens);
  void show(uint64_t job, const Job& its, uint32_t layer);
  absl::StatusOr<std::vector<KvRun>> runs_of(const KvLoad& load) const;
  absl::Status claim(const std::vector<KvRun>& runs, Load& load);
  void unclaim(const Load& load, size_t blocks);
  absl::StatusOr<KvTransfer::At> at(const std::string& address) const;
  bool needs(const KvShare& share) const;

  const base::MadeHere made_here_;
  const BatonConnectorOptions options_;
  const bool threads_;
  base::CacheMemory memory_;
  Agent* const agent_;          // the session's
  std::shared_ptr<Agent> own_;  // before it has it
  std::unique_ptr<KvSession> session_;
  const std::string nonce_;  // no other connector's loads have such names
  KvLayout layout_;
  std::vector<std::pair<uint32_t, size_t>> places_;  // the model's number of each layer, its group
  std::vector<std::vector<bool>> claimed_;           // blocks of open loads, by group
  absl::flat_hash_map<KvRequestId, Load> loads_;
  absl::flat_hash_map<uint64_t, Job> jobs_;
  absl::flat_hash_map<std::string, uint64_t> by_key_;
  uint64_t next_name_ = 1;
};

// --- decode ------------------------------------------------------------------------------------

// A group's blocks after another's, each of what it keeps.
absl::StatusOr<std::vector<KvRun>> BatonConnector::runs_of(const KvLoad& load) const {
  if (load.first_token >= load.tokens.size()) return invalid("no tokens are requested");
  std::vector<KvRun> runs;
  size_t at = 0;
  for (const KvGroup& group : layout_.groups) {
    if (load.first_token % group.block_tokens != 0) {
      return invalid(absl::StrCat("first_token ", load.first_token,
                                  " is not a multiple of the block size ", group.block_tokens));
    }
    KvRun& run = runs.emplace_back();
    run.tokens = kept_tokens(group, load.first_token, load.tokens.size());
    run.first_block = run.tokens.begin / group.block_tokens;
    const size_t count = (run.tokens.end - 1) / group.block_tokens + 1 - run.first_block;
    if (count > load.blocks.size() - at) {
      return invalid(absl::StrCat("only ", load.blocks.size(), " blocks for KV that fills more"));
    }
    for (; run.blocks.size() < count; ++at) {
      if (load.blocks[at] >= group.blocks) {
        return invalid(absl::StrCat("block ", load.blocks[at], " of a cache that has ",
                                    group.blocks, " blocks"));
      }
      run.blocks.push_back(load.blocks[at]);
    }
  }
  if (at == load.blocks.size()) return runs;
  return invalid(absl::StrCat(load.blocks.size(), " blocks for KV that fills ", at));
}

absl::Status BatonConnector::claim(const std::vector<KvRun>& runs, Load& load) {
  claimed_.resize(runs.size());
  for (size_t g = 0; g < runs.size(); ++g) {
    claimed_[g].resize(layout_.groups[g].blocks);
    load.group_ends.push_back(load.blocks.size() + runs[g].blocks.size());
    for (const uint32_t block : runs[g].blocks) {
      if (claimed_[g][block]) {
        unclaim(load, load.blocks.size());
        return invalid(absl::StrCat("block ", block,
                                    " is in use: it is named twice, or by a load that has not "
                                    "been ended"));
      }
      claimed_[g][block] = true;
      load.blocks.push_back(block);
    }
  }
  return absl::OkStatus();
}

// The first `blocks` of them.
void BatonConnector::unclaim(const Load& load, size_t blocks) {
  size_t at = 0;
  for (size_t g = 0; g < load.group_ends.size(); ++g) {
    for (; at < std::min({blocks, load.group_ends[g], load.blocks.size()}); ++at) {
      claimed_[g][load.blocks[at]] = false;
    }
  }
}

// The worker at an address. Its agent is "" where a host and port do not say it.
absl::StatusOr<KvTransfer::At> BatonConnector::at(const std::string& address) const {
  if (!address.starts_with("baton1:")) {
    const auto split = net::split_host_port(address);
    if (!split.ok()) return split.status();
    return KvTransfer::At{"", address};
  }
  const absl::StatusOr<Address> decoded = Address::decode(address);
  if (!decoded.ok()) return decoded.status();
  const std::string& name = decoded->name;
  if (!threads_ || (name.size() > kNonce && name[name.size() - kNonce - 1] == '~')) {
    return KvTransfer::At{name, address};
  }
  return absl::FailedPreconditionError(
      absl::StrCat("prefill ", name,
                   " is of a release whose connectors have other messages (docs/upgrading.md): "
                   "install the same one on both workers"));
}

bool BatonConnector::needs(const KvShare& share) const {
  return std::any_of(layout_.groups.begin(), layout_.groups.end(), [&](const KvGroup& group) {
    return !share.heads(group.total_heads, {group.first_head, group.first_head + group.heads})
                .empty();
  });
}

absl::Status BatonConnector::start_load(KvLoad load) {
  if (load.transfer.has_value()) {
    return absl::InvalidArgumentError(
        "a connector does not take part in hand-offs: name `prefill` or `shards`, not `transfer`");
  }
  if (absl::Status good = no_cache("load"); !good.ok()) return good;
  if (loads_.contains(load.id)) {
    return absl::AlreadyExistsError(absl::StrCat("load ", load.id, " is already in progress"));
  }
  if (load.shards.empty()) load.shards = {std::move(load.prefill)};
  if (load.timeout <= Time::zero()) return invalid("the timeout must be more than nothing");
  if (load.key.size() > kMaxKey) return invalid("the key is too long");
  if (load.shards.size() > kMaxRanks) return invalid("too many prefill workers");
  if (load.loads_of_key == 0 || load.loads_of_key > kMaxRanks) {
    return invalid(absl::StrCat(load.loads_of_key, " loads of one key"));
  }
  if (load.pull && load.lease <= Time::zero()) {
    return invalid("a lease must be more than nothing and at most a day");
  }
  absl::StatusOr<std::vector<KvRun>> runs = runs_of(load);
  if (!runs.ok()) return runs.status();
  KvOrder order;
  order.id = load.id;
  order.from.transfer = load.key.empty() ? absl::StrCat(nonce_, next_name_++)
                                         : absl::StrCat("key:", absl::BytesToHexString(load.key));
  Load record;
  const auto ranks = static_cast<uint32_t>(load.shards.size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    KvTransfer::At& worker = order.from.workers.emplace_back();
    if (!needs({ranks, rank, session::turn_of(agent_->name())})) continue;
    absl::StatusOr<KvTransfer::At> found = at(load.shards[rank]);
    if (!found.ok()) return found.status();
    worker = *std::move(found);
    for (uint32_t other = 0; other < rank; ++other) {
      if (load.shards[other] != load.shards[rank]) continue;
      return invalid("two of its prefill workers have one address: name each rank's own");
    }
    absl::StrAppend(&record.from, record.from.empty() ? "" : " or ",
                    worker.agent.empty() ? worker.address : worker.agent);
  }
  if (absl::Status good = claim(*runs, record); !good.ok()) return good;
  order.runs = *std::move(runs);
  order.timeout = std::min(load.timeout, kMaxTimeout);
  order.silence = load.silence;
  order.push = !load.pull;
  order.tokens = std::move(load.tokens);
  order.first_token = load.key.empty() ? load.first_token : 0;  // others may need what this has
  order.loads = load.key.empty() ? 1 : load.loads_of_key;
  if (load.pull) order.lease = std::min(load.lease, kMaxTimeout);
  order.decode = options_.worker.name;
  absl::Status started = session_->load(std::move(order));
  if (!started.ok()) {
    unclaim(record, SIZE_MAX);
    return started;
  }
  loads_[load.id] = std::move(record);
  return started;
}

// --- prefill -----------------------------------------------------------------------------------

uint64_t BatonConnector::open(const std::string& key, const std::string& transfer, size_t tokens) {
  const uint64_t number = session_->open(transfer, tokens);
  if (number == 0) return 0;
  Job& job = jobs_[number];
  job.key = key;
  job.tokens = tokens;
  job.first.assign(places_.size(), 0);
  for (const auto& [layer, group] : places_) {
    job.pages.emplace_back(layout_.blocks_for(tokens, group), kNotSaved);
  }
  if (!key.empty()) by_key_[key] = number;
  return number;
}

std::optional<KvJob> BatonConnector::next_job() {
  while (std::optional<KvAsked> asked = session_->next_asked()) {
    std::string key;
    if (absl::string_view hex = asked->transfer; absl::ConsumePrefix(&hex, "key:")) {
      key = absl::HexStringToBytes(hex);
    }
    if (jobs_.size() >= kMaxJobs) {
      session_->refuse(asked->transfer,
                       absl::ResourceExhaustedError(absl::StrCat(
                           jobs_.size(), " jobs are open already: ask another worker")));
      continue;
    }
    KvJob job;
    job.job = open(key, asked->transfer, asked->tokens.size());
    if (job.job == 0) continue;
    job.request = asked->request;
    job.decode = asked->decode;
    job.key = key;
    job.loads_of_key = asked->loads;
    job.tokens = std::move(asked->tokens);
    job.first_token = asked->first_token;
    return job;
  }
  return std::nullopt;
}

absl::StatusOr<uint64_t> BatonConnector::bind(const KvBinding& binding) {
  if (absl::Status good = no_cache("job"); !good.ok()) return good;
  if (binding.key.empty() || binding.key.size() > kMaxKey || binding.tokens == 0 ||
      binding.loads == 0 || binding.loads > kMaxRanks || binding.lease <= Time::zero()) {
    return absl::InvalidArgumentError(absl::StrCat("a job that is bound needs a key of 1 to ",
                                                   kMaxKey, " bytes, tokens, 1 to ", kMaxRanks,
                                                   " loads and a lease"));
  }
  if (by_key_.contains(binding.key)) {
    return absl::AlreadyExistsError(absl::StrCat("job \"", binding.key, "\" is open already"));
  }
  if (jobs_.size() >= kMaxJobs) {
    return absl::ResourceExhaustedError(absl::StrCat(jobs_.size(), " jobs are open already"));
  }
  const uint64_t job =
      open(binding.key, absl::StrCat("key:", absl::BytesToHexString(binding.key)), binding.tokens);
  if (job == 0) return absl::AlreadyExistsError("a job with this key is ending: bind it later");
  session_->expect(job, binding.loads, std::min(binding.lease, kMaxTimeout));
  return job;
}

absl::Status BatonConnector::save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                                        absl::Span<const uint32_t> blocks) {
  if (absl::Status good = agent_->usable(); !good.ok()) return good;
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return no_job(job);
  Job& its = it->second;
  if (its.finished) return is_finished(job);
  if (!session_->is_wanted(job)) {
    return absl::CancelledError(absl::StrCat(
        "job ", job, " is no longer wanted: decode gave it up, is gone, or did not come in time"));
  }
  const uint64_t end = uint64_t{first_block} + blocks.size();
  const size_t all = layer < places_.size() ? its.pages[layer].size() : 0;
  if (layer >= places_.size() || end > all) {
    return absl::OutOfRangeError(absl::StrCat("job ", job, " has layers [0, ", places_.size(),
                                              ") and blocks [0, ", all, "), not layer ", layer,
                                              ", blocks [", first_block, ", ", end, ")"));
  }
  for (const uint32_t block : blocks) {
    if (block < group_of(layer).blocks) continue;
    return absl::OutOfRangeError(
        absl::StrCat("block ", block, " of a cache that has ", group_of(layer).blocks, " blocks"));
  }
  std::vector<uint32_t>& pages = its.pages[layer];
  const bool none =
      std::all_of(pages.begin(), pages.end(), [](uint32_t page) { return page == kNotSaved; });
  for (size_t i = 0; i < blocks.size(); ++i) {
    uint32_t& page = pages[first_block + i];
    if (page == kNotSaved) page = blocks[i];
  }
  if (!blocks.empty()) {
    its.first[layer] = none ? first_block : std::min<size_t>(its.first[layer], first_block);
    if (options_.mode == KvSendMode::kLayerwise) show(job, its, layer);
  }
  return absl::OkStatus();
}

// Shows the blocks of a layer that are saved without a gap.
void BatonConnector::show(uint64_t job, const Job& its, uint32_t layer) {
  const std::vector<uint32_t>& pages = its.pages[layer];
  const auto first = pages.begin() + static_cast<ptrdiff_t>(its.first[layer]);
  const auto end = std::find(first, pages.end(), kNotSaved);
  const std::vector<uint32_t> run(first, end);
  if (!run.empty()) session_->save(job, layer, its.first[layer], run).IgnoreError();
}

void BatonConnector::finish_job(uint64_t job, const absl::Status& outcome) {
  const auto it = jobs_.find(job);
  if (it == jobs_.end() || std::exchange(it->second.finished, true)) return;
  if (!outcome.ok()) return session_->fail(job, outcome);
  for (uint32_t layer = 0; options_.mode == KvSendMode::kSerialized && layer < places_.size();
       ++layer) {
    show(job, it->second, layer);
  }
  session_->hold(job);
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvConnector>> make_baton_connector(
    const BatonConnectorOptions& options) {
  AgentOptions agent;
  agent.name = agent_name(options.worker.name);
  agent.worker = options.worker;
  agent.serve_metadata = true;
  agent.serve_thread = agent.progress_thread = false;  // the session's thread does both
  absl::StatusOr<std::unique_ptr<Agent>> made = Agent::create(std::move(agent));
  if (!made.ok()) return made.status();
  auto connector = std::make_unique<BatonConnector>(*std::move(made), options, true);
  if (absl::Status started = connector->start(); !started.ok()) return started;
  return connector;
}

std::unique_ptr<KvConnector> make_baton_connector(std::unique_ptr<Worker> worker,
                                                  const BatonConnectorOptions& options) {
  AgentOptions agent;
  agent.name = options.worker.name;
  agent.worker.key = options.worker.key;
  agent.serve_metadata = true;
  agent.serve_thread = agent.progress_thread = false;
  absl::StatusOr<std::unique_ptr<Agent>> made = Agent::create(std::move(worker), std::move(agent));
  if (!made.ok()) return nullptr;
  auto connector = std::make_unique<BatonConnector>(*std::move(made), options, false);
  if (!connector->start().ok()) return nullptr;
  return connector;
}

WorkerStats worker_stats(const KvConnector& connector) {
  const auto* baton = dynamic_cast<const BatonConnector*>(&connector);
  return baton == nullptr ? WorkerStats{} : baton->worker_stats();
}

}  // namespace baton::kvtransfer
