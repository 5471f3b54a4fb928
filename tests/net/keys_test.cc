// The arithmetic of keys and tags, against the vectors of those who defined it.
#include <dlfcn.h>
#include <openssl/rand.h>

#include "absl/strings/escaping.h"
#include "tests/test.h"
#include "transport/base/worker_keys.h"
#include "transport/net/ciphers/crypto.h"
#include "transport/net/ciphers/siphash.h"
#include "transport/net/seal.h"

namespace {

bool openssl_has_memory = true;

}  // namespace

// Stands in for OpenSSL's.
extern "C" int EVP_CipherUpdate(EVP_CIPHER_CTX* context, unsigned char* out, int* done,
                                const unsigned char* in, int bytes) {
  static const auto real =
      reinterpret_cast<decltype(&EVP_CipherUpdate)>(dlsym(RTLD_NEXT, "EVP_CipherUpdate"));
  return openssl_has_memory ? real(context, out, done, in, bytes) : 0;
}

namespace baton::net {
namespace {

std::string hex(std::string_view bytes) { return absl::BytesToHexString(std::string(bytes)); }
std::string bytes_of(const char* hex) { return absl::HexStringToBytes(hex); }
Key32 key_of(const std::string& bytes) {
  Key32 key{};
  std::copy(bytes.begin(), bytes.end(), key.begin());
  return key;
}

TEST(Keys, HkdfIsThatOfRfc5869) {
  struct Case {
    std::string secret, salt, info;
    const char* root;
    const char* out;
  };
  const auto counted = [](int from, int to) {
    std::string out;
    for (int i = from; i <= to; ++i) out.push_back(static_cast<char>(i));
    return out;
  };
  // Appendix A.1 to A.3.
  const std::vector<Case> cases = {
      {std::string(22, '\x0b'), counted(0, 0x0c), counted(0xf0, 0xf9),
       "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
       "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"},
      {counted(0, 0x4f), counted(0x60, 0xaf), counted(0xb0, 0xff),
       "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
       "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e"
       "590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"},
      {std::string(22, '\x0b'), "", "",
       "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
       "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"},
  };
  for (const Case& each : cases) {
    const Key32 root = hkdf_extract(each.salt, each.secret);
    EXPECT_EQ(hex(view(root)), each.root);
    EXPECT_EQ(hex(hkdf_expand(root, each.info, std::string(each.out).size() / 2)), each.out);
  }
}

// Threads of workers may still meet peers when main() has returned.
TEST(Keys, AreMadeUntilAProgramHasEnded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own
  const auto end = [] {
    // Registered first, so called last.
    std::atexit([] {
      unsigned char byte = 0;
      _exit(RAND_bytes(&byte, 1) == 1 ? 7 : 8);
    });
    base::make_worker_secret();
    std::exit(0);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(7), "");
}

TEST(Keys, AgreementIsThatOfRfc7748) {  // section 6.1
  const auto key = [](const char* hex) { return key_of(bytes_of(hex)); };
  const auto shared =
      agree(key("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"),
            key("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"));
  ASSERT_TRUE(shared.has_value());
  EXPECT_EQ(hex(view(*shared)), "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742");
  EXPECT_FALSE(agree(KeyPair::make().private_key, Key32{}).has_value());  // of small order
}

TEST(Keys, GcmIsThatOfItsProposal) {  // McGrew and Viega, test cases 13 and 14
  Aead aead(Key32{}, Aead::Direction::kSeal);
  std::string tag(16, ' ');
  aead.start(0);
  aead.seal(tag.data());
  EXPECT_EQ(hex(tag), "530f8afbc74536b9a963b4f1c4cb738b");
  std::string text(16, '\0');
  aead.start(0);
  aead.crypt(text.data(), text.size(), text.data());
  aead.seal(tag.data());
  EXPECT_EQ(hex(text), "cea7403d4d606b6e074ec5d3baf39d18");
  EXPECT_EQ(hex(tag), "d0d1c8a799996bf0265b98b5d48ab919");
}

TEST(Keys, WithoutMemoryNothingGoesOutUnsealed) {
  std::string text = "not for everybody", tag(16, ' ');
  Aead seals(Key32{}, Aead::Direction::kSeal);
  openssl_has_memory = false;
  seals.start(1);
  seals.crypt(text.data(), text.size(), text.data());
  seals.seal(tag.data());
  openssl_has_memory = true;
  EXPECT_EQ(text, std::string(text.size(), '\0'));
  Aead opens(Key32{}, Aead::Direction::kOpen);
  opens.start(1);
  opens.crypt(text.data(), text.size(), text.data());
  EXPECT_FALSE(opens.open(tag.data()));
}

TEST(Keys, SipHashIsThatOfOpenssl) {
  Key32 key{};
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(7 * i);
  uint64_t halves[2];
  std::memcpy(halves, key.data(), sizeof halves);
  const SipHash ours(halves[0], halves[1]);
  EVP_MAC* const mac = EVP_MAC_fetch(nullptr, "SIPHASH", nullptr);
  ASSERT_NE(mac, nullptr);
  for (size_t bytes = 8; bytes < 200; ++bytes) {
    std::string text;
    for (size_t i = 0; i < bytes; ++i) text.push_back(static_cast<char>(i * 31 + bytes));
    EVP_MAC_CTX* const context = EVP_MAC_CTX_new(mac);
    unsigned char theirs[16];
    size_t length = 0;
    EVP_MAC_init(context, key.data(), 16, nullptr);
    EVP_MAC_update(context, reinterpret_cast<const unsigned char*>(text.data()), text.size());
    EVP_MAC_final(context, theirs, &length, sizeof theirs);
    EVP_MAC_CTX_free(context);
    ASSERT_EQ(length, 16u);
    uint64_t number = 0;
    std::memcpy(&number, text.data(), sizeof number);
    const auto tag = ours(number, std::string_view(text).substr(sizeof number));
    EXPECT_EQ(0, std::memcmp(tag.data(), theirs, sizeof theirs)) << bytes << " bytes";
  }
  EVP_MAC_free(mac);
}

// ---- seals ----

// "head|payload" of each frame as far as they are believed.
std::vector<std::string> opened(Opener& opener, std::string wire, size_t payload) {
  std::vector<std::string> out;
  while (!wire.empty()) {
    std::string_view head;
    const auto found = opener.head(wire.data(), wire.size(), 200, head);
    if (found != Opener::Found::kHead) break;
    const std::string said(head);
    wire.erase(0, said.size() + kSealBytes);
    const size_t tag = opener.payload() ? kSealTag : 0;
    if (wire.size() < payload + tag) break;
    std::string body = wire.substr(0, payload);
    if (opener.payload()) {
      opener.start_payload();
      opener.payload(body.data(), body.size());
      if (!opener.end_payload(wire.data() + payload)) break;
    }
    wire.erase(0, payload + tag);
    out.push_back(said + "|" + body);
  }
  return out;
}

TEST(Seal, AHeadIsAsLongAsItMayBeAndNoLonger) {
  const Key32 key = KeyPair::make().private_key;
  Sealer sealer(key, Protection::kHeads);
  Opener opener(key, Protection::kHeads);
  std::string wire(20 + kSealBytes, 'h');
  sealer.head(wire.data(), 20);
  std::string_view head;
  for (size_t have = 0; have < wire.size(); ++have) {
    EXPECT_EQ(opener.head(wire.data(), have, 20, head), Opener::Found::kMore);
  }
  EXPECT_EQ(opener.head(wire.data(), 4, 19, head), Opener::Found::kForged);
  EXPECT_EQ(opener.head(wire.data(), wire.size(), 20, head), Opener::Found::kHead);
}

// What is sent is what got the tag, whatever becomes of the memory that it came from.
TEST(Seal, ACopyIsSealed) {
  const Key32 key = KeyPair::make().private_key;
  for (const Protection protection : {Protection::kIntegrity, Protection::kEncrypt}) {
    Sealer sealer(key, protection);
    Opener opener(key, protection);
    std::string source = "payload";
    std::string copy(source.size() + kSealTag, '\0');
    sealer.start_payload();
    sealer.payload(source.data(), source.size(), copy.data());
    source = "another";
    sealer.end_payload(copy.data() + source.size());
    std::string head(1 + kSealBytes, 'h');
    sealer.head(head.data(), 1);
    EXPECT_EQ(opened(opener, head + copy, 7), (std::vector<std::string>{"h|payload"}));
  }
}

// Nor while it is copied: here what is written to the copy changes the original, whose pages are
// the same ones.
TEST(Seal, TheTagIsOfTheCopy) {
  constexpr size_t kBytes = 32, kShift = 16;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const int file = memfd_create("one page, seen twice", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(page)), 0);
  const auto view = [&] {
    return static_cast<char*>(mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  };
  char* const copy = view();
  char* const original = view() + kShift;
  for (size_t i = 0; i < kBytes; ++i) original[i] = static_cast<char>('A' + i);
  const Key32 key = KeyPair::make().private_key;
  Sealer sealer(key, Protection::kIntegrity);
  Opener opener(key, Protection::kIntegrity);
  sealer.start_payload();
  sealer.payload(original, kBytes, copy);
  EXPECT_NE(std::string(original, kBytes), std::string(copy, kBytes));
  std::string tag(kSealTag, '\0'), head(1 + kSealBytes, 'h');
  sealer.end_payload(tag.data());
  sealer.head(head.data(), 1);
  EXPECT_EQ(opened(opener, head + std::string(copy, kBytes) + tag, kBytes).size(), 1u);
  munmap(copy, page);
  munmap(original - kShift, page);
  close(file);
}

// ---- frames in any order ----

TEST(ReplayWindow, EachNumberOnceInAnyOrder) {
  ReplayWindow window;
  for (const uint64_t number : {5u, 3u, 4u, 0u, 4000u, 4005u, 6u}) {
    EXPECT_FALSE(window.seen(number)) << number;
    window.add(number);
    EXPECT_TRUE(window.seen(number)) << number;
  }
  EXPECT_FALSE(window.seen(1));
  EXPECT_FALSE(window.seen(4004));
  // What is older than the window is taken for seen; what is in it stays known.
  window.add(4005 + ReplayWindow::kNumbers - 1);
  EXPECT_TRUE(window.seen(4005));
  EXPECT_TRUE(window.seen(4000));
  EXPECT_FALSE(window.seen(4006));
  window.add(1 << 20);
  EXPECT_TRUE(window.seen(4005 + ReplayWindow::kNumbers - 1));
  EXPECT_FALSE(window.seen((1 << 20) - 1));
  EXPECT_FALSE(window.seen((1 << 20) - ReplayWindow::kNumbers + 1));
  EXPECT_TRUE(window.seen((1 << 20) - ReplayWindow::kNumbers));
}

}  // namespace
}  // namespace baton::net
