# Prints what a phone has, a line of NAME=VALUE each: the fields of `PhoneFacts` in `examine.py`.
rpc=libcdsprpc.so
public=/vendor/etc/public.libraries.txt
echo "page_size=$(getconf PAGE_SIZE 2>/dev/null)"
echo "soc_id=$(cat /sys/devices/soc0/soc_id 2>/dev/null)"
for f in /vendor/lib64/$rpc /system/vendor/lib64/$rpc; do [ -e $f ] && echo "rpc=$f" && break; done
[ -e $public ] && echo "lists=1" && grep -q "^$rpc" $public && echo "public=1"
for f in /dev/fastrpc-cdsp /dev/fastrpc-cdsp-secure /dev/adsprpc-smd; do
    [ -e $f ] && echo "rpc_device=$f" && break
done
echo "skels=$(ls /vendor/lib/rfsa/adsp /vendor/dsp/cdsp /data/local/tmp/edgekit 2>/dev/null |
    grep -o 'libQnnHtpV[0-9]*Skel.so' | sort -u | tr '\n' ' ')"
for f in /apex/com.android.neuralnetworks/lib64/libneuralnetworks.so /system/lib64/libneuralnetworks.so; do
    [ -e $f ] && echo "nnapi=$f" && break
done
echo "nnapi_drivers=$(ls /vendor/etc/vintf/manifest 2>/dev/null | grep -i neuralnetworks | tr '\n' ' ')"
