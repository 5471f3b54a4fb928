// The cable: packets wait until they are due, and are then written to the other end.
#include "tests/two_hosts/wire.h"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace baton {
namespace {

constexpr size_t kLongestPacket = 65536;
constexpr Time kLongestQueue = std::chrono::milliseconds(300);  // behind a limited rate

// The sum of RFC 1071 over both parts.
uint16_t checksum(const void* data, size_t bytes, uint32_t sum) {
  const auto* at = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; i += 2) sum += at[i] << 8 | (i + 1 < bytes ? at[i + 1] : 0);
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return htons(static_cast<uint16_t>(~sum));
}

// The heads of a TCP packet over IPv4; false for others.
bool parse(const std::vector<uint8_t>& packet, iphdr& ip, tcphdr& tcp) {
  if (packet.size() < sizeof ip) return false;
  std::memcpy(&ip, packet.data(), sizeof ip);
  const size_t head = size_t{ip.ihl} * 4;
  if (ip.version != 4 || ip.protocol != IPPROTO_TCP || packet.size() < head + sizeof tcp)
    return false;
  std::memcpy(&tcp, packet.data() + head, sizeof tcp);
  return true;
}

// One name for both directions of a connection.
std::string name_of(const iphdr& ip, const tcphdr& tcp) {
  const auto end = [](uint32_t address, uint16_t port) {
    return std::to_string(address) + ':' + std::to_string(port);
  };
  const std::string from = end(ip.saddr, tcp.source), to = end(ip.daddr, tcp.dest);
  return std::min(from, to) + '-' + std::max(from, to);
}

}  // namespace

Wire::Wire(base::UniqueFd end_0, base::UniqueFd end_1, uint64_t seed)
    : ends_{std::move(end_0), std::move(end_1)}, random_(seed) {}

void Wire::forget_connections(bool reset) {
  forgotten_.insert(known_.begin(), known_.end());
  resets_ = reset;
}

bool Wire::forgotten(size_t sender, const Packet& packet) {
  iphdr ip;
  tcphdr tcp;
  if (!parse(packet, ip, tcp)) return false;
  const std::string name = name_of(ip, tcp);
  if (tcp.syn != 0 && tcp.ack == 0) forgotten_.erase(name);
  known_.insert(name);
  if (forgotten_.count(name) == 0) return false;
  if (resets_ && tcp.rst == 0) reset(sender, packet);
  return true;
}

// Answers a packet as a host does that knows nothing of its connection.
void Wire::reset(size_t sender, const Packet& packet) {
  iphdr ip;
  tcphdr tcp;
  parse(packet, ip, tcp);
  std::swap(ip.saddr, ip.daddr);
  std::swap(tcp.source, tcp.dest);
  const size_t payload = packet.size() - size_t{ip.ihl} * 4 - size_t{tcp.doff} * 4;
  const uint32_t seq = tcp.ack != 0 ? ntohl(tcp.ack_seq) : 0;
  const uint32_t ack = ntohl(tcp.seq) + static_cast<uint32_t>(payload) + tcp.syn + tcp.fin;
  ip.ihl = 5;
  ip.tot_len = htons(sizeof ip + sizeof tcp);
  ip.check = 0;
  ip.check = checksum(&ip, sizeof ip, 0);
  tcphdr answer{};
  answer.source = tcp.source;
  answer.dest = tcp.dest;
  answer.seq = htonl(seq);
  answer.ack_seq = htonl(ack);
  answer.doff = sizeof answer / 4;
  answer.rst = answer.ack = 1;
  uint32_t pseudo = IPPROTO_TCP + sizeof answer;
  for (const uint32_t each : {ntohl(ip.saddr), ntohl(ip.daddr)}) {
    pseudo += (each >> 16) + (each & 0xffff);
  }
  answer.check = checksum(&answer, sizeof answer, pseudo);
  Packet out(sizeof ip + sizeof answer);
  std::memcpy(out.data(), &ip, sizeof ip);
  std::memcpy(out.data() + sizeof ip, &answer, sizeof answer);
  (void)!write(ends_[sender].get(), out.data(), out.size());
}

// Answers a packet as a router or a firewall does that lets nothing through: "destination
// unreachable", with the beginning of the packet. Of ICMP itself nobody is told.
void Wire::refuse(size_t sender, const Packet& packet, int code) {
  iphdr ip;
  tcphdr tcp;
  if (!parse(packet, ip, tcp)) return;
  const size_t quoted = std::min(packet.size(), size_t{ip.ihl} * 4 + 8);
  icmphdr answer{};
  answer.type = ICMP_DEST_UNREACH;
  answer.code = static_cast<uint8_t>(code);
  Packet out(sizeof ip + sizeof answer + quoted);
  uint8_t* const body = out.data() + sizeof ip;
  std::memcpy(body + sizeof answer, packet.data(), quoted);
  std::memcpy(body, &answer, sizeof answer);
  answer.checksum = checksum(body, sizeof answer + quoted, 0);
  std::memcpy(body, &answer, sizeof answer);
  std::swap(ip.saddr, ip.daddr);
  ip.ihl = 5;
  ip.protocol = IPPROTO_ICMP;
  ip.tot_len = htons(static_cast<uint16_t>(out.size()));
  ip.frag_off = 0;
  ip.ttl = 64;
  ip.check = 0;
  ip.check = checksum(&ip, sizeof ip, 0);
  std::memcpy(out.data(), &ip, sizeof ip);
  (void)!write(ends_[sender].get(), out.data(), out.size());
}

void Wire::take(size_t sender, Time now) {
  for (int most = 0; most < 64; ++most) {
    buffer_.resize(kLongestPacket);
    const ssize_t got = read(ends_[sender].get(), buffer_.data(), buffer_.size());
    if (got <= 0) return;
    buffer_.resize(static_cast<size_t>(got));
    const WireFaults& faults = faults_[sender];
    if (faults.unreachable >= 0) {
      refuse(sender, buffer_, faults.unreachable);
      ++counts_[sender].lost;
      continue;
    }
    if (forgotten(sender, buffer_) || faults.cut || buffer_.size() > faults.largest ||
        chance(faults.loss)) {
      ++counts_[sender].lost;
      continue;
    }
    if (chance(faults.flip)) {
      const size_t bit = random_() % (buffer_.size() * 8);
      buffer_[bit / 8] = static_cast<uint8_t>(buffer_[bit / 8] ^ (1 << bit % 8));
    }
    if (chance(faults.duplicate)) send(sender, buffer_, now);
    send(sender, buffer_, now);
  }
}

void Wire::send(size_t sender, const Packet& packet, Time now) {
  const WireFaults& faults = faults_[sender];
  Time at = now + faults.delay;
  if (faults.jitter > Time(0)) {
    at += Time(static_cast<Time::rep>(random_() % static_cast<uint64_t>(faults.jitter.count())));
  }
  if (faults.bytes_per_s != 0) {
    Time& busy = busy_until_[sender];
    busy = std::max(busy, now);
    if (busy - now > kLongestQueue) {
      ++counts_[sender].lost;
      return;
    }
    busy += Time(1'000'000'000 * packet.size() / faults.bytes_per_s);
    at += busy - now;
  }
  late_.push({at, order_++, sender, packet});
}

void Wire::deliver(Time now) {
  while (!late_.empty() && late_.top().at <= now) {
    const Late& due = late_.top();
    if (!faults_[due.sender].cut) {  // what was on the way when it was cut never arrives
      // A device that is down takes nothing: as lost as anywhere else.
      if (write(ends_[1 - due.sender].get(), due.packet.data(), due.packet.size()) > 0) {
        ++counts_[due.sender].packets;
        counts_[due.sender].bytes += due.packet.size();
      }
    }
    late_.pop();
  }
}

Time Wire::next() const { return late_.empty() ? kNever : late_.top().at; }

}  // namespace baton
