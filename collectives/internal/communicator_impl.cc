// Wiring the parts of a communicator together.
#include "collectives/internal/communicator_impl.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "collectives/internal/calibrate.h"

namespace baton {

using collectives::internal::Calibration;
using collectives::internal::CallStarter;
using collectives::internal::CallTable;
using collectives::internal::ControlMessage;
using collectives::internal::DeviceCalls;
using collectives::internal::Driver;
using collectives::internal::Mesh;
using collectives::internal::Request;
using collectives::internal::Tuner;
using collectives::proof::CallShape;

namespace {

// Its value was checked when the worker was made. Of equal names the first counts.
DeviceCalls::Sums sums_wanted(const SettingValues& settings) {
  for (const auto& [name, value] : settings) {
    if (name != "staging.sums") continue;
    if (value == "cpus") return DeviceCalls::Sums::kCpus;
    return value == "kernel" ? DeviceCalls::Sums::kKernel : DeviceCalls::Sums::kAuto;
  }
  return DeviceCalls::Sums::kAuto;
}

}  // namespace

Communicator::Impl::Impl(CommunicatorOptions communicator_options)
    : options(std::move(communicator_options)),
      mesh(options, *this),
      recorder(mesh.rank()),
      failure(options.name, mesh, recorder),
      survivors(options, mesh, failure) {}

Communicator::Impl::~Impl() {
  driver.reset();
  if (devices != nullptr) devices->stop();
  mesh.leave();
  executor.reset();
}

absl::Status Communicator::Impl::start() {
  if (absl::Status status = mesh.start(); !status.ok()) return status;
  executor = std::make_unique<collectives::executor::Executor>(
      mesh.rank(), mesh.links(), &mesh.memory(), mesh.worker().clock(), &recorder);
  collectives::proof::CostParameters cost;
  cost.node_size = mesh.node_size();
  cost.cores_move_local = true;
  // With more ranks than cores, a short call in shared memory is over when the kernel lets it be.
  const bool at_the_kernels_mercy = mesh.crowded() && !mesh.any_transfer();
  tuner = std::make_unique<Tuner>(Tuner::Settings{mesh.rank(), mesh.ranks(), options.slot_bytes,
                                                  options.tune, at_the_kernels_mercy},
                                  cost);
  devices = std::make_unique<DeviceCalls>(mesh, sums_wanted(options.worker.settings));
  calls = std::make_unique<CallTable>(CallTable::Needs{options, mesh.rank(), mesh.ranks(),
                                                       mesh.worker().clock(), mesh.control(),
                                                       *tuner, *executor, recorder, devices.get()});
  failure.watch(*executor, *calls);
  driver = std::make_unique<Driver>(Driver::Needs{mutex, mesh, *executor, *calls, failure});
  starter = std::make_unique<CallStarter>(
      CallStarter::Needs{options, mutex, mesh, *tuner, *calls, failure, *driver, *devices});
  if (options.calibrate) {
    if (absl::Status status = calibrate(); !status.ok()) return status;
  }
  if (options.background) driver->start_background();
  return absl::OkStatus();
}

absl::Status Communicator::Impl::calibrate() {
  const auto wait = [this](const absl::StatusOr<Work>& work) {
    return work.ok() ? driver->wait(*work) : work.status();
  };
  Calibration with;
  with.rank = mesh.rank();
  with.ranks = mesh.ranks();
  with.node_size = mesh.node_size();
  with.slot_bytes = options.slot_bytes;
  with.memory = &mesh.memory();
  with.clock = &mesh.worker().clock();
  with.exchange = [&](bool sends, std::byte* data, size_t bytes, uint32_t other) {
    return wait(starter->begin_point_to_point(sends, data, bytes, DataType::kU8,
                                              static_cast<int>(other), CallOptions{}));
  };
  with.gather = [&](const std::string& mine, char* all) {
    CallOptions plain;
    plain.algorithm = Algorithm::kDirect;
    return wait(starter->begin({Collective::kAllGather, mine.data(), all, mine.size(),
                                DataType::kU8, ReduceOp::kSum, 0, plain}));
  };
  const Time started = mesh.now();
  auto cost = collectives::internal::measure_costs(with, tuner->parameters());
  if (!cost.ok()) return cost.status();
  tuner->set_parameters(cost->parameters, mesh.now() - started);
  executor->set_stream_over_read(cost->stream_over_read);
  return absl::OkStatus();
}

void Communicator::Impl::on_control_message(uint32_t from, ControlMessage kind,
                                            std::string_view body) {
  if (kind == ControlMessage::kBallot) {
    survivors.on_ballot(from, body);
  } else {
    failure.on_control_message(from, kind, body);
  }
}

void Communicator::Impl::on_down(uint32_t rank, const absl::Status& why) {
  failure.on_down(rank, why);
}

absl::Status Communicator::Impl::status() const { return failure.broken(); }

absl::StatusOr<CommBuffer> Communicator::Impl::allocate(size_t bytes) {
  Lock lock(mutex);
  absl::StatusOr<Block> block = mesh.memory().allocate_for_caller(std::max<size_t>(bytes, 64));
  if (!block.ok()) return block.status();
  if (absl::Status status = mesh.publish_regions(); !status.ok()) return status;
  size_t index = 0;
  while (index < buffers_.size() && buffers_[index].data != nullptr) ++index;
  if (index == buffers_.size()) buffers_.emplace_back();
  buffers_[index] = *block;
  return CommBuffer{block->data, bytes, static_cast<uint32_t>(index)};
}

void Communicator::Impl::free(const CommBuffer& buffer) {
  Lock lock(mutex);
  if (buffer.index >= buffers_.size()) return;
  Block& block = buffers_[buffer.index];
  if (block.data == nullptr || block.data != buffer.data) return;
  mesh.memory().free(block);
  block = Block{};
}

std::optional<absl::Status> Communicator::Impl::test(Work work) {
  Lock lock(mutex);
  if (!driver->background()) {
    driver->advance();
    driver->tick_sometimes();
  }
  return calls->reap(work);
}

bool Communicator::Impl::progress() {
  Lock lock(mutex);
  const bool any = driver->advance();
  driver->tick_sometimes();
  return any;
}

void Communicator::Impl::abort(const absl::Status& why) {
  Lock lock(mutex);
  failure.fail(absl::Status(why.ok() ? absl::StatusCode::kAborted : why.code(),
                            absl::StrCat("rank ", mesh.rank(), " called abort(): ", why.message())),
               mesh.rank(), true);
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::shrink() {
  absl::StatusOr<CommunicatorOptions> next;
  {
    Lock lock(mutex);
    next = survivors.agree();
  }
  if (!next.ok()) return next.status();
  return Communicator::create(*std::move(next));
}

std::string Communicator::Impl::explain(Collective collective, size_t bytes,
                                        const CallOptions& call_options) const {
  Lock lock(mutex);
  Request request;
  request.collective = collective;
  request.options = call_options;
  CallShape shape = starter->shape_of(request);
  shape.bytes = bytes;
  return absl::StrCat(tuner->explain(shape), devices->explain_sums(collective, bytes));
}

std::string Communicator::Impl::routes() const {
  Lock lock(mutex);
  std::string out;
  for (const Mesh::Member& member : mesh.members()) {
    if (member.link != nullptr)
      absl::StrAppend(&out, member.label, ": ", member.link->route(), "\n");
  }
  absl::StrAppend(&out, devices->explain());
  return out;
}

std::vector<int> Communicator::Impl::lost_ranks() const {
  Lock lock(mutex);
  std::vector<int> lost;
  for (uint32_t r = 0; r < mesh.ranks(); ++r) {
    if (failure.lost()[r]) lost.push_back(static_cast<int>(r));
  }
  return lost;
}

CommunicatorStats Communicator::Impl::stats() const {
  Lock lock(mutex);
  CommunicatorStats stats;
  stats.calls = calls->calls_made();
  stats.messages = executor->messages();
  stats.bytes_sent = executor->bytes_sent();
  for (const Mesh::Member& member : mesh.members()) {
    if (member.direct != nullptr) stats.direct_bytes += member.direct->in_place_bytes();
  }
  stats.sleeps = driver->sleeps();
  stats.staged_calls = devices->calls();
  stats.staged_bytes = devices->bytes();
  return stats;
}

}  // namespace baton
