// Which pieces of which files a transfer is made of: neighbours are one, in the order of the files,
// and each goes where it belongs. What system calls say: agent_files_test.cc.
#include "tests/kvtransfer/agent_pair.h"
#include "tests/no_descriptors.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kPiece = 4096;

class AgentFilePieces : public ::testing::Test {
 protected:
  base::UniqueFd opened(const std::string& name) {
    base::UniqueFd file(::open(folder_.path(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    EXPECT_TRUE(agent_->register_memory({at(file, 0, 16)}, MemoryKind::kFile).ok());
    return file;
  }
  static Descriptor at(const base::UniqueFd& file, size_t piece, size_t count = 1) {
    return {piece * kPiece, count * kPiece, static_cast<uint64_t>(file.get())};
  }
  Descriptor here(size_t piece) const { return {memory_.address(piece * kPiece), kPiece, 0}; }
  std::string mine(size_t piece) const {
    const char* const begin = reinterpret_cast<const char*>(memory_.bytes.data());
    return {begin + piece * kPiece, kPiece};
  }
  static std::string read(const base::UniqueFd& file, size_t piece) {
    std::string out(kPiece, '\0');
    const ssize_t got = pread(file.get(), out.data(), kPiece, static_cast<off_t>(piece * kPiece));
    out.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return out;
  }
  AgentTransferId make(Op op, const std::vector<Descriptor>& local,
                       const std::vector<Descriptor>& files) {
    const auto made = agent_->make_transfer(op, local, files, "me", {}, MemoryKind::kFile);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.value_or(AgentTransferId());
  }
  // In how many pieces.
  uint64_t run(Op op, const std::vector<Descriptor>& local, const std::vector<Descriptor>& files) {
    const AgentTransferId id = make(op, local, files);
    EXPECT_TRUE(agent_->post(id).ok());
    const absl::Status ended = agent_->wait(id, patient(std::chrono::seconds(60)));
    EXPECT_TRUE(ended.ok()) << ended;
    return agent_->telemetry(id)->descriptors;
  }

  TemporaryFolder folder_;
  std::unique_ptr<Agent> agent_ = make_agent(agent_options("me", "tcp"));
  AgentMemory memory_{*agent_, 16 * kPiece, 1};
};

TEST_F(AgentFilePieces, NeighboursOnBothSidesAreOne) {
  const base::UniqueFd file = opened("file");
  EXPECT_EQ(run(Op::kWrite, {here(0), here(1), here(2)}, {at(file, 4), at(file, 5), at(file, 6)}),
            1u);
  EXPECT_EQ(run(Op::kWrite, {here(2), here(0), here(1)}, {at(file, 6), at(file, 4), at(file, 5)}),
            1u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(read(file, 4 + i), mine(i));
  EXPECT_EQ(run(Op::kWrite, {here(0), here(2)}, {at(file, 4), at(file, 5)}), 2u) << "memory's gap";
  EXPECT_EQ(read(file, 5), mine(2));
  EXPECT_EQ(run(Op::kWrite, {here(0), here(1)}, {at(file, 8), at(file, 10)}), 2u) << "the file's";
  EXPECT_EQ(read(file, 8), mine(0));
  EXPECT_EQ(read(file, 10), mine(1));
}

// One transfer, whose pieces follow each other but for the file, and lie next to each other here.
TEST_F(AgentFilePieces, EachGoesToItsFile) {
  const base::UniqueFd one = opened("one"), other = opened("other");
  EXPECT_EQ(run(Op::kWrite, {here(3), here(4), here(5), here(6)},
                {at(one, 0), at(other, 1), at(one, 2), at(other, 3)}),
            4u);
  EXPECT_EQ(read(one, 0), mine(3));
  EXPECT_EQ(read(other, 1), mine(4));
  EXPECT_EQ(read(one, 2), mine(5));
  EXPECT_EQ(read(other, 3), mine(6));
  EXPECT_EQ(read(one, 3), "");
  EXPECT_EQ(run(Op::kWrite, {here(8), here(9)}, {at(one, 8), at(other, 9)}), 2u);
  EXPECT_EQ(read(one, 8), mine(8));
  EXPECT_EQ(read(one, 9), "");
  EXPECT_EQ(read(other, 9), mine(9));
  const std::vector<uint8_t> before = memory_.bytes;
  std::fill(memory_.bytes.begin(), memory_.bytes.end(), uint8_t{0});
  EXPECT_EQ(run(Op::kRead, {here(5), here(6)}, {at(one, 2), at(other, 3)}), 2u);
  EXPECT_TRUE(std::equal(before.begin() + 5 * kPiece, before.begin() + 7 * kPiece,
                         memory_.bytes.begin() + 5 * kPiece));
}

TEST_F(AgentFilePieces, FilesGetNoMessageAndAnEmptyMessageIsNotSent) {
  const base::UniqueFd file = opened("file");
  const AgentTransferId id = make(Op::kWrite, {here(0)}, {at(file, 0)});
  const std::string_view words = "words", none = "";
  EXPECT_TRUE(absl::IsUnimplemented(agent_->post(id, &words)));
  EXPECT_EQ(*agent_->state(id), AgentTransferState::kIdle);
  EXPECT_TRUE(agent_->post(id, &none).ok());
  EXPECT_TRUE(agent_->wait(id, patient(std::chrono::seconds(60))).ok());
  EXPECT_EQ(*agent_->state(id), AgentTransferState::kDone);
}

TEST_F(AgentFilePieces, AFileThatCannotBeKeptOpenIsNotRegistered) {
  const base::UniqueFd file(::open(folder_.path("file").c_str(), O_RDWR | O_CREAT, 0600));
  absl::Status full;
  {
    const NoDescriptors none;
    full = agent_->register_memory({at(file, 0)}, MemoryKind::kFile);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(agent_->register_memory({at(file, 0)}, MemoryKind::kFile).ok());
}

}  // namespace
}  // namespace baton::kvtransfer
