// How ranks meet and agree, messages of rank 0, and the exchange of slices.
#include "engine/shard/group.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::engine::shard {
namespace {

// Most messages fit into the first of two broadcasts: what is decoded next is some words for each
// sequence. Its first four bytes say how long the message is.
constexpr size_t kInline = 4096;
constexpr size_t kMaxMessage = size_t{64} << 20;
constexpr size_t kRecord = 8192;  // of agree()
constexpr size_t kMaxAbout = 4096;
constexpr CallOptions kPatient{.timeout = kNever};

}  // namespace

absl::StatusOr<std::unique_ptr<Group>> Group::meet(CommunicatorOptions options,
                                                   bool expert_parallel) {
  const Time timeout = options.timeout;
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      Communicator::create(std::move(options));
  if (!communicator.ok()) return communicator.status();
  return std::unique_ptr<Group>(new Group(*std::move(communicator), expert_parallel, timeout));
}

absl::StatusOr<std::vector<std::string>> Group::agree(const Settings& settings,
                                                      std::string_view about_me) {
  std::string record;
  base::put_number(record, static_cast<uint16_t>(settings.size()));
  for (const auto& [name, value] : settings) {
    base::put_text(record, name);
    base::put_text(record, value);
  }
  base::put_text(record, about_me);
  if (about_me.size() > kMaxAbout || record.size() > kRecord) {
    return absl::InvalidArgumentError("the settings of a tensor-parallel rank are too long");
  }
  record.resize(kRecord);
  const int ranks = communicator_->ranks();
  std::string all(kRecord * static_cast<size_t>(ranks), '\0');
  absl::Status status =
      communicator_->all_gather(record.data(), all.data(), kRecord, DataType::kU8, kPatient);
  if (!status.ok()) return status;

  std::vector<std::string> about;
  Settings first;
  for (int rank = 0; rank < ranks; ++rank) {
    base::WireReader reader(
        std::string_view(all).substr(kRecord * static_cast<size_t>(rank), kRecord));
    Settings theirs(reader.number<uint16_t>());
    for (auto& [name, value] : theirs) {
      name = reader.text(kRecord);
      value = reader.text(kRecord);
    }
    about.emplace_back(reader.text(kMaxAbout));
    if (reader.failed() || (rank > 0 && theirs.size() != first.size())) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " is of another version than rank 0"));
    }
    for (size_t i = 0; rank > 0 && i < first.size(); ++i) {
      if (theirs[i] == first[i]) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "tensor-parallel ranks must be started alike, but ", first[i].first, " is \"",
          first[i].second, "\" at rank 0 and \"", theirs[i].second, "\" at rank ", rank));
    }
    if (rank == 0) first = std::move(theirs);
  }
  return about;
}

absl::Status Group::tell(std::string_view message) {
  if (message.size() > kMaxMessage) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", message.size(), " bytes to tensor-parallel ranks"));
  }
  const auto length = static_cast<uint32_t>(message.size());
  message_.assign(reinterpret_cast<const char*>(&length), sizeof(length));
  message_.append(message);
  message_.resize(std::max(message_.size(), kInline));
  char* data = message_.data();
  absl::Status status = communicator_->broadcast(data, data, kInline, DataType::kU8, 0);
  const size_t rest = message_.size() - kInline;
  if (!status.ok() || rest == 0) return status;
  return communicator_->broadcast(data + kInline, data + kInline, rest, DataType::kU8, 0);
}

absl::StatusOr<std::string_view> Group::receive(const std::function<bool()>& idle) {
  message_.resize(kInline);
  absl::StatusOr<Work> work = communicator_->broadcast_async(message_.data(), message_.data(),
                                                             kInline, DataType::kU8, 0, kPatient);
  if (!work.ok()) return work.status();
  absl::Status status;
  if (idle) {
    std::optional<absl::Status> ended;
    while (!(ended = communicator_->test(*work)).has_value()) idle();
    status = *ended;
  } else {
    status = communicator_->wait(*work);
  }
  if (!status.ok()) return status;
  uint32_t length = 0;
  std::memcpy(&length, message_.data(), sizeof(length));
  if (length > kMaxMessage) {
    return absl::InternalError(absl::StrCat("rank 0 announces a message of ", length, " bytes"));
  }
  const size_t whole = sizeof(length) + length;
  if (whole > kInline) {
    message_.resize(whole);
    char* rest = message_.data() + kInline;
    status = communicator_->broadcast(rest, rest, whole - kInline, DataType::kU8, 0);
    if (!status.ok()) return status;
  }
  return std::string_view(message_).substr(sizeof(length), length);
}

absl::StatusOr<std::string_view> Group::exchange(std::string_view mine) {
  answers_.resize(mine.size() * static_cast<size_t>(communicator_->ranks()));
  absl::Status status =
      communicator_->all_gather(mine.data(), answers_.data(), mine.size(), DataType::kU8);
  if (!status.ok()) return status;
  return std::string_view(answers_);
}

absl::StatusOr<float*> Group::allocate(size_t floats) {
  absl::StatusOr<CommBuffer> buffer = communicator_->allocate(floats * sizeof(float));
  if (!buffer.ok()) return buffer.status();
  return reinterpret_cast<float*>(buffer->data);
}

absl::Status Group::all_gather(float* all, size_t count) {
  return communicator_->all_gather(all + static_cast<size_t>(communicator_->rank()) * count, all,
                                   count, DataType::kF32);
}

// The parts of a model cannot do without one another.
absl::Status Group::none_missing(Work work) const {
  const std::vector<int> missing = experts_->missing(work);
  if (missing.empty()) return absl::OkStatus();
  communicator_->progress();
  if (absl::Status status = communicator_->status(); !status.ok()) return status;
  return absl::UnavailableError(
      absl::StrCat("rank ", missing[0], " does not answer for its experts"));
}

absl::StatusOr<ShardExchange::Asked> Group::ask_experts(const float* rows, int tokens,
                                                        std::span<const int32_t> chosen) {
  if (experts_ == nullptr) {
    ExpertsOptions options{.experts = shape_.experts,
                           .top_k = shape_.per_token,
                           .hidden = shape_.hidden,
                           .max_tokens = shape_.max_tokens};
    options.type = DataType::kF32;
    options.rank_timeout = timeout_;
    auto made = Experts::create(*communicator_, options);
    if (!made.ok()) return made.status();
    experts_ = *std::move(made);
  }
  const auto received = experts_->dispatch(rows, tokens, {chosen.data(), chosen.size()});
  if (!received.ok()) return received.status();
  asked_ = received->work;
  if (absl::Status status = none_missing(asked_); !status.ok()) return status;
  Asked asked;
  for (const ExpertGroup& group : received->groups) {
    if (group.count == 0) continue;
    asked.groups.push_back({group.expert - experts_->first_expert(), group.first, group.count});
  }
  for (size_t slot = 0; slot < received->row_of.size(); ++slot) {
    asked.rows.push_back(reinterpret_cast<const float*>(received->row(static_cast<int>(slot))));
  }
  asked.answers = reinterpret_cast<float*>(received->outputs);
  return asked;
}

absl::Status Group::sum_answers(std::span<const float> weights, float* out, size_t floats) {
  const auto work = experts_->combine_async(asked_, {weights.data(), weights.size()}, out,
                                            floats * sizeof(float));
  if (!work.ok()) return work.status();
  const absl::Status status = experts_->wait(*work);
  return status.ok() ? none_missing(*work) : status;
}

absl::Status Group::look() {
  communicator_->progress();
  return communicator_->status();
}

}  // namespace baton::engine::shard
